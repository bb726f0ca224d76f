"""A run as a row of a table: what is known of it, at any width, whatever its texts hold."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.evidence_of import evidence
from wellfed.explain.report.run_digest import WIDE, RunDigest, digest, lines, row

FOLDER = Path("logs/recsys/runs/2026-01-01_00-00-00_aaaa")
NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


def of(**changes: Any) -> RunDigest:
    return digest(FOLDER, evidence(**changes).record)


def test_a_row_has_what_a_run_came_to() -> None:
    metrics = {"train/loss": 1.0, "test/top": 0.5, "val/first": 0.25, "val/best": 0.125}
    started_at = "2026-01-01T11:57:00+00:00"
    one = of(ceiling=1.25, metrics=metrics, started_at=started_at, workload="recsys")
    assert one.of_ceiling_frac == pytest.approx(0.8)
    cells = dict(zip(WIDE, row(one, NOW), strict=False))
    assert cells == {
        "run": FOLDER.name,
        "workload": "recsys",
        "status": "ok",
        "age": "3 min",
        "rate": "12,673 samples/s",
        "ceiling": "80.0 %",
        "steps": "100",
        "first finding": "",
        "metric": "val/first 0.25",
    }


@pytest.mark.parametrize(
    ("metrics", "config", "metric"),
    [
        ({"val/a": 1.0, "val/b": 2.0}, {"trainer": {"best_metric": "b"}}, "val/b"),
        ({"val/a": 1.0}, {"trainer": {"best_metric": "gone"}}, "val/a"),
        ({"train/loss": 1.0, "test/a": 1.0}, {"trainer": None}, "test/a"),
        ({"train/loss": 1.0}, {}, None),
    ],
)
def test_the_metric_is_the_one_that_picks_the_best(metrics: Any, config: Any, metric: str | None) -> None:
    assert of(metrics=metrics, config=config).metric == metric


@pytest.mark.parametrize(
    ("started_at", "age"),
    [
        ("2026-01-01T11:59:30+00:00", "30 s"),
        ("2026-01-01T13:00:00", "0 s"),  # a clock that was put back
        ("2026-01-01T09:00:00", "3 h"),
        ("2025-12-01T12:00:00+00:00", "31 d"),
        ("", ""),
        ("yesterday", ""),
    ],
)
def test_the_age_is_shown_in_its_largest_unit(started_at: str, age: str) -> None:
    assert row(of(started_at=started_at), NOW)[3] == age


def test_a_record_that_cannot_be_read_is_a_row_too() -> None:
    one = digest(FOLDER, PermissionError(13, "Permission denied"))
    assert (one.status, one.workload, one.problem) == ("damaged", "recsys", "Permission denied")
    assert lines([row(one, NOW)], None)[-1] == "  Permission denied"


def test_where_there_is_no_room_the_rest_stands_below() -> None:
    rows = [row(of(ceiling=1.25, metrics={"val/a": 0.25}, workload="hyperspectral", status="interrupted"), NOW)]
    head, first, below = lines(rows, 80)
    assert head.split() == ["run", "workload", "status", "age", "rate"]
    assert max(map(len, (head, first, below))) <= 80
    assert below == "  80.0 % of the ceiling, 100 steps, val/a 0.25"
    assert len(lines(rows, None)) == len(lines(rows, 200)) == 2


@given(st.text(), st.text(), st.text(), st.text(), st.sampled_from([40, 80, None]))
def test_no_text_breaks_the_table_or_reaches_the_terminal(
    name: str, unit: str, finding: str, said: str, width: int | None
) -> None:
    one = RunDigest(name, "folder", name, finding, said, 1.0, 2, 3.0, unit, 0.5, finding, said, 1.0, said)
    found = lines([row(one, NOW)], width)
    assert len(found) in (2, 3)
    assert all(line.isprintable() or not set(line) & {"\x1b", "\n", "\r", "\x9b"} for line in found)
