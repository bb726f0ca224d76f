from collections.abc import Sequence

import pytest

from tests.kit import made
from wellfed.errors import ConfigError
from wellfed.study.ranking.board_entry import Leaderboard
from wellfed.study.ranking.ranking import chosen, leaderboard, tie_text
from wellfed.study.rows import Row, Rows
from wellfed.study.study_files import SweepFile

SWEEP = made.sweep_file({"loader": ("baseline", "balanced", "aggressive")})
SLOW, MIDDLE, FAST = SWEEP.points


def board_of(rows: Sequence[Row], sweep: SweepFile = SWEEP) -> Leaderboard:
    return leaderboard(sweep, Rows(tuple(rows)))


def three(*rates: float, own: float | None = 0.01, peaks: Sequence[float | None] = (9.0, 7.0, 8.0)) -> Leaderboard:
    figures = zip(SWEEP.points, rates, peaks, strict=True)
    return board_of([made.row(point, rate, own=own, peak_memory_gib=peak) for point, rate, peak in figures])


def refusal(board: Leaderboard, point: str | None = None) -> str:
    with pytest.raises(ConfigError) as raised:
        chosen(board, point)
    return str(raised.value)


def test_the_fastest_is_chosen_or_the_one_that_is_named():
    board = three(100, 200, 300)
    assert chosen(board).point == FAST.id
    assert chosen(board, SLOW.id).point == SLOW.id


def test_without_a_rate_nothing_is_chosen():
    board = board_of([made.failed_row(SLOW, "oom"), made.failed_row(MIDDLE, "failed")])
    text = refusal(board)
    assert "quick: no point has a rate (1 oom, 1 failed, 1 pending), so there is nothing to choose." in text
    assert "python -m wellfed leaderboard shows why" in text


def test_a_point_that_failed_is_told_why():
    board = board_of([made.failed_row(SLOW, "oom"), made.row(FAST)])
    text = refusal(board, SLOW.id)
    assert f"--point {SLOW.id}: has no rate; it is oom: CUDA ran out of memory" in text
    assert f"Leave --point out for the fastest, {FAST.id}." in text
    assert ".." not in text


def test_a_tie_names_the_one_that_needs_least_memory():
    board = three(99.8, 99.9, 100, peaks=(9.0, 5.0, 8.0))
    told = tie_text(board, chosen(board))
    assert told is not None
    assert told.startswith("2 other points can't be told apart from it (rank 1=)")
    assert f"{MIDDLE.id} needs the least memory: --point {MIDDLE.id}." in told
