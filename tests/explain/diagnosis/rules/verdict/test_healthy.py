"""What is said of a run in which no time is known to be lost."""

from typing import Any

import pytest

from tests.kit.evidence_of import evidence, walled
from wellfed.explain.diagnosis.rules.verdict_rules import healthy, unknown


def of_rate(low: float, high: float, *, ceiling: float | None = None) -> Any:
    throughput = {"samples_per_s": 1000.0, "ci95": [low, high], "steps": 30, "warmup_steps": 3}
    return evidence(ceiling=ceiling, throughput={**throughput, "sample_unit": "rows"})


@pytest.mark.parametrize("ceiling", [None, 0.9, 1.05, 1.3])
def test_a_rate_that_is_hardly_known_is_no_reason_to_stop(ceiling: float | None) -> None:
    found = unknown(of_rate(-100.0, 2100.0, ceiling=ceiling))
    assert found is not None
    assert "steps varied too much. 1,000 rows/s has a 95 % interval from 0 to 2,100. More steps" in found.message


def test_it_is_healthy_or_unknown_and_never_both() -> None:
    for steps_s, is_healthy in ((90.0, False), (91.0, True)):
        run = evidence(ceiling=1.005, wall=walled(steps_s=steps_s, other_s=100 - steps_s))
        assert (healthy(run) is not None) == is_healthy
        assert (unknown(run) is None) == is_healthy
    for ceiling, is_healthy in ((1.0, False), (1.005, True)):
        run = evidence(wait_ms=0.8, ceiling=ceiling, wall=walled(steps_s=100.0))
        assert (healthy(run) is not None) == is_healthy, "7 % of waiting and no higher ceiling contradict each other"
        assert (unknown(run) is None) == is_healthy
    assert healthy(of_rate(600.0, 1400.0)) is None, "without a ceiling nobody knows"
