"""The ledger: what is written is read, whatever happened to the lines before and after."""

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wellfed.errors import ConfigError
from wellfed.record.entries import Status
from wellfed.study.ledger import Ledger, Read, append, read
from wellfed.study.objective import SAMPLES_PER_S
from wellfed.study.row import Row

TEXT = st.sampled_from(["", "ü", "\n", "\r\n", "\u2028", "\udc80"])
STATUSES = get_args(Status)
ROWS = st.builds(
    Row,
    point=TEXT,
    kind=st.sampled_from(["trial", "confirm"]),
    overrides=st.lists(TEXT, max_size=3).map(tuple),
    status=st.sampled_from(STATUSES),
    attempt=st.integers(1, 9),
    samples_per_s=st.none() | st.floats(-1e18, 1e18),
    ci95=st.none() | st.tuples(st.floats(0, 1e9), st.floats(0, 1e9)),
    error=st.none() | st.fixed_dictionaries({"kind": TEXT, "message": TEXT, "advice": TEXT}),
    exit_code=st.none() | st.integers(-64, 255),
    stderr=st.lists(TEXT, max_size=3).map(tuple),
)


def row(point: str = "a", status: Status = "ok", **known: object) -> Row:
    return replace(Row(point, "trial", (f"seed={point}",), status, 1), **known)


def file_of(folder: Path) -> Path:
    return folder / "ledger.jsonl"


def missing(folder: Path, points: list[str], *retry: str) -> list[str]:
    return Ledger(folder, SAMPLES_PER_S, "abc", retry).missing(points)


@given(st.lists(ROWS, max_size=4), st.lists(ROWS, max_size=2))
@settings(max_examples=30)
def test_what_is_written_is_read_in_order(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Row], more: list[Row]
) -> None:
    folder = tmp_path_factory.getbasetemp() / "ledger"
    folder.mkdir(exist_ok=True)
    file_of(folder).unlink(missing_ok=True)
    append(folder, rows)
    append(folder, more)
    assert read(folder) == Read((*rows, *more))
    lines = file_of(folder).read_bytes().splitlines() if rows or more else []
    assert len(lines) == len(rows) + len(more)


def test_a_figure_that_is_no_number_is_left_open(tmp_path: Path) -> None:
    append(tmp_path, [row(samples_per_s=float("nan"), readiness_frac=float("inf"))])
    (found,) = read(tmp_path).rows
    assert (found.samples_per_s, found.readiness_frac) == (None, None)
    json.loads(file_of(tmp_path).read_text(), parse_constant=lambda name: 1 / 0)


def test_a_last_line_cut_anywhere_loses_that_row_alone(tmp_path: Path) -> None:
    first, last, new = row("a"), row("b", device="Grün\u2028 \U0001f600", stderr=("x", "ü")), row("c")
    append(tmp_path, [first])
    begin = file_of(tmp_path).stat().st_size
    append(tmp_path, [last])
    whole = file_of(tmp_path).read_bytes()
    for end in (begin, begin + 1, (begin + len(whole)) // 2, len(whole) - 2, len(whole) - 1, len(whole)):
        file_of(tmp_path).write_bytes(whole[:end])
        kept = (first, last) if end >= len(whole) - 1 else (first,)  # all but its end is a row
        assert read(tmp_path) == Read(kept), end
        append(tmp_path, [new])
        assert read(tmp_path) == Read((*kept, new)), end
        append(tmp_path, [new])
        assert read(tmp_path).rows == (*kept, new, new), end


def test_the_last_row_of_a_point_counts() -> None:
    found = Read((row("a", "oom"), row("b"), row("a", attempt=2), row("b", kind="confirm", status="failed")))
    assert {point: row.status for point, row in found.latest.items()} == {"a": "ok", "b": "ok"}
    assert [each.status for each in found.of("b", "confirm")] == ["failed"]
    assert [row.attempt for row in found.of("a", "trial")] == [1, 2]
    assert found.of("a", "confirm") == []


def test_a_row_of_another_version_is_refused_with_its_file(tmp_path: Path) -> None:
    file_of(tmp_path).write_text('{"point": "a"}\n')
    with pytest.raises(ConfigError, match=r"ledger.jsonl: .*Give the study another name"):
        read(tmp_path)


@pytest.mark.parametrize("status", [status for status in STATUSES if status != "running"])
def test_what_the_same_command_runs_again(tmp_path: Path, status: Status) -> None:
    append(tmp_path, [row("a", status)])
    never_ran = status in ("invalid", "infeasible", "interrupted")
    assert missing(tmp_path, ["a"]) == (["a"] if never_ran else [])
    assert missing(tmp_path, ["a"], status) == ["a"]
