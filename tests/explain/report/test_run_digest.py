"""A run as a row of a table: what is known of it, at any width, whatever its texts hold."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.evidence_of import evidence
from wellfed.explain.diagnosis.finding import word_of
from wellfed.explain.report.run_digest import RunDigest, digest, runs_table
from wellfed.record.entries import FindingEntry

FOLDER = Path("logs/recsys/runs/2026-01-01_00-00-00_aaaa")


def finding(name: str, severity: str) -> FindingEntry:
    return {
        **{"id": name, "severity": severity, "message": "", "evidence": {}, "change": [], "changes_learning": False},
        **{"gain": None, "text": ""},
    }  # type: ignore[typeddict-item]


STARVED = finding("too_few_workers", "high")


def of(**changes: Any) -> RunDigest:
    return digest(FOLDER, evidence(**changes).record)


def shown(width: int | None, *runs: RunDigest) -> list[str]:
    return [line.plain for line in runs_table(runs).lines(width)]


def cells(one: RunDigest) -> dict[str, str]:
    """The cells of a run by their heads, cut by the position of the heads."""
    head, row, *_ = shown(None, one)
    starts = [found.span() for found in re.finditer(r"\S+(?: \S+)*", head)]
    ends = [start for start, _ in starts[1:]] + [None]
    return {head[slice(*span)]: row[span[0] : end].strip() for span, end in zip(starts, ends, strict=True)}


def test_a_row_has_what_a_run_came_to() -> None:
    metrics = {"train/loss": 1.0, "test/top": 0.5, "val/first": 0.25, "val/best": 0.125}
    started_at = "2026-01-01T11:57:00+00:00"
    known = {"findings": [STARVED], "overrides": ["gpu=24gb", "seed=3"]}
    one = of(
        wait_ms=2.0, compute_ms=8.0, ceiling=1.25, metrics=metrics, started_at=started_at, workload="recsys", **known
    )
    assert one.data["of_ceiling_frac"] == pytest.approx(0.8)
    assert cells(one) == {
        "run": FOLDER.name,
        "workload": "recsys",
        "status": "ok",
        "started": "2026-01-01 11:57",
        "verdict": "Starved",
        "rate": "12,673 samples/s",
        "ceiling": "80.0 %",
        "metric": "val/first 0.25",
        "typed": "gpu=24gb seed=3",
    }


@pytest.mark.parametrize(("copy_ms", "is_simulated"), [(0.1, True), (None, False)])
def test_a_rate_of_a_simulated_card_is_marked(copy_ms: float | None, is_simulated: bool) -> None:
    one = of(copy_ms=copy_ms, machine={"gpus": [{"index": 0, "name": "Simulated GPU", "is_simulated": True}]})
    assert one.data["is_simulated"] is is_simulated
    assert cells(one)["rate"].endswith("samples/s simulated" if is_simulated else "samples/s")


def test_a_ceiling_that_waiting_contradicts_is_marked() -> None:
    assert cells(of(wait_ms=10.0, ceiling=2.0))["ceiling"] == "50.0 %"
    assert cells(of(ceiling=2.0))["ceiling"] == "50.0 % (doubtful)"


@pytest.mark.parametrize(
    ("metrics", "config", "metric"),
    [
        ({"val/a": 1.0, "val/b": 2.0}, {"trainer": {"best_metric": "b"}}, "val/b"),
        ({"val/a": 1.0, "val/b": 2.0}, {"trainer": {"best_metric": "val_b"}}, "val/b"),
        ({"val/a": 1.0}, {"trainer": {"best_metric": "gone"}}, "val/a"),
        ({"train/loss": 1.0, "test/a": 1.0}, {"trainer": None}, "test/a"),
        ({"train/loss": 1.0}, {}, None),
    ],
)
def test_the_metric_is_the_one_that_picks_the_best(metrics: Any, config: Any, metric: str | None) -> None:
    assert of(metrics=metrics, config=config).data["metric"] == metric


def test_a_record_that_cannot_be_read_is_a_row_too() -> None:
    one = digest(FOLDER, PermissionError(13, "Permission denied"))
    assert (one.data["status"], one.data["workload"], one.data["problem"]) == ("damaged", "recsys", "Permission denied")
    assert shown(None, one)[-1].endswith("  Permission denied")
    assert shown(80, one)[-1] == "  problem Permission denied"


def test_a_verdict_has_the_words_and_the_colour_of_the_page() -> None:
    table = runs_table([of(findings=[STARVED]), of(findings=[finding("healthy", "info")])])
    words = [(span.style, line.plain[span.start : span.end]) for line in table.lines(None) for span in line.spans]
    assert [(style, word) for style, word in words if style in ("red", "green")] == [
        ("red", word_of(STARVED)),
        ("green", "Fed"),
    ]


@settings(max_examples=15)
@given(st.text(), st.text(), st.text(), st.sampled_from([1, 20, 40, 80, None]))
def test_no_text_breaks_the_table_or_reaches_the_terminal(
    unit: str, workload: str, said: str, width: int | None
) -> None:
    one = evidence(workload=workload, overrides=[said], error={"kind": "code", "message": said, "advice": said}).record
    assert one.throughput is not None
    one.throughput["sample_unit"] = unit
    found = shown(width, digest(FOLDER, one))
    if width is None:
        assert len(found) == 2
    assert all(line.isprintable() or not set(line) & {"\x1b", "\n", "\r", "\x9b"} for line in found)
