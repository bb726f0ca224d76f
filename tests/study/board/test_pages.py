"""The page of a sweep shows typed values as text, needs no network, and is complete after any failure."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.kit import made
from tests.kit.browser import opened
from tests.kit.page_reader import Page, read_page
from wellfed.study.board.files import to_html, write
from wellfed.study.ranking.board_entry import Leaderboard
from wellfed.study.ranking.ranking import leaderboard
from wellfed.study.rows import Row, Rows
from wellfed.study.study_files import SweepFile

EVIL = "<script>alert(1)</script>"
QUOTE = "\"><img src='x' onerror=alert(1)>"


def board(sweep: SweepFile, rows: Sequence[Row] | None = None) -> Leaderboard:
    return leaderboard(sweep, Rows(tuple(made.rows(sweep) if rows is None else rows)))


def page(sweep: SweepFile, rows: Sequence[Row] | None = None) -> Page:
    """The parsed page, which neither runs nor loads anything."""
    return read_page(to_html(board(sweep, rows)))


def test_a_real_sweep_shows_each_point_and_what_became_of_it() -> None:
    sweep = made.sweep_file()
    found = page(sweep)
    assert all(point in found.text for point in sweep.ids)
    for words in ("Fastest", "Without a rate: 6 points", "Pending: 1 point"):
        assert words in found.text
    assert "KeyError: '<b>\"embedding\"</b> & more'" in found.text


@pytest.mark.parametrize("evil", [EVIL, QUOTE])
def test_every_text_of_the_users_is_shown_as_it_is(evil: str) -> None:
    sweep = made.sweep_file(
        {evil: (evil, "other"), "loader": ("baseline", evil), "n": ("1", "2")},
        fixed=(f"fixed={evil}",),
        name=f"name{evil}",
        workload=f"workload{evil}",
        sample_unit=f"unit{evil}",
        code=f"code{evil}",
    )
    failed, odd, *rest, _pending = sweep.points
    error = {"kind": f"kind{evil}", "message": f"message{evil}", "advice": f"advice{evil}"}
    rows = [
        made.failed_row(failed, "failed", error=error, stderr=(f"stderr{evil}",), folder=f"folder{evil}"),
        made.row(
            odd, 900.0, machine=f"machine{evil}", device=f"device{evil}", code=f"rowcode{evil}", peak_memory_gib=3.0
        ),
        *(made.row(point, 1000.0 + place, peak_memory_gib=4.0) for place, point in enumerate(rest)),
    ]
    found = page(sweep, rows)
    names = ("name", "workload", "unit", "code", "machine", "kind", "message", "advice", "stderr", "folder", "device")
    for name in (*names, "rowcode"):
        assert f"{name}{evil}" in found.text, name
    assert "b" not in found.open


def test_two_axes_have_a_map_and_other_numbers_have_none() -> None:
    sweep = made.sweep_file({"loader": ("baseline", "balanced"), "n": ("1", "2", "3"), "seed": ("1",)})
    rates = (100.0, 200.0, 300.0, 400.0)
    rows = [made.row(point, rate) for point, rate in zip(sweep.points, rates, strict=False)]
    html = to_html(board(sweep, [*rows, made.failed_row(sweep.points[4], "oom")]))
    cells = re.findall(r"--heat:(\d+)%\">(\d+)&nbsp;%", html)
    assert sorted(cells) == [("0", "25"), ("100", "100"), ("33", "50"), ("67", "75")]
    assert re.findall(r"<td class=none>(\w+)", html) == ["oom", "pending"]
    for axes in ({"loader": ("baseline", "balanced")}, dict.fromkeys("abc", ("0", "1"))):
        other = made.sweep_file(axes)
        assert "--heat" not in to_html(board(other, [made.row(point) for point in other.points])).partition("<body")[2]


@pytest.mark.parametrize("status", ["oom", "failed"])
def test_a_sweep_where_all_failed(status: str) -> None:
    sweep = made.sweep_file({"loader": ("baseline", "balanced"), "n": ("1", "2")})
    found = page(sweep, [made.failed_row(point, status) for point in sweep.points])
    assert "No point has a rate." in found.text
    assert "Without a rate: 4 points" in found.text
    assert found.text.count(made.ERRORS[status]["message"]) >= 4
    assert found.charts == []


@pytest.mark.slow
def test_a_phone_shows_all_of_it(chromium: Path, tmp_path: Path) -> None:
    *_, html = write(tmp_path, board(made.sweep_file()))
    found = opened(chromium, html, tmp_path / "browser", width=390, is_dark=True)
    assert found["scrolls"] <= 390
    assert (found["wide"], found["cut"], found["overlaps"], found["console"]) == ([], [], [], [])
