"""What is said of a run in which no time is lost."""

from __future__ import annotations

from tests.diagnosis.evidence_of import evidence
from wellfed.diagnosis.rules.healthy import check


def of_rate(low: float, high: float, *, ceiling: float | None = None) -> str:
    throughput = {"samples_per_s": 1000.0, "ci95": [low, high], "steps": 30, "warmup_steps": 3}
    return check(evidence(ceiling=ceiling, throughput={**throughput, "sample_unit": "rows"})).message


def test_a_rate_that_is_hardly_known_is_no_reason_to_stop() -> None:
    for ceiling in (None, 0.9, 1.05, 1.3):
        told = of_rate(-100.0, 2100.0, ceiling=ceiling)
        assert told.startswith("Steps varied so much that nothing to tune can be told: 1,000 rows/s, with a 95 %")
        assert "from 0 to 2,100. More steps (trainer.max_steps)" in told
    assert of_rate(600.0, 1400.0).startswith("Nothing to tune was found")
