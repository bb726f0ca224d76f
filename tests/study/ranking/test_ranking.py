"""The leaderboard: order, ranks and ratios that a reader can trust, and notes of what he could trip over."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit import made
from wellfed.study.board.columns import columns
from wellfed.study.points.space import Choices
from wellfed.study.ranking.board_entry import Entry, Leaderboard
from wellfed.study.ranking.ranking import leaderboard
from wellfed.study.rows import Row, Rows
from wellfed.study.study_files import SweepFile

FOUR = made.sweep_file({"loader": ("baseline", "a", "b", "c")})


def board(*rows: Row, sweep: SweepFile = FOUR) -> Leaderboard:
    return leaderboard(sweep, Rows(rows))


def rated(*rates: float | None, own: float | None = 0.01, sweep: SweepFile = FOUR) -> list[Row]:
    points = zip(sweep.points, rates, strict=False)
    return [made.row(point, rate, own=own) for point, rate in points if rate is not None]


def confirm(row: Row, rate: float | None, **more: object) -> Row:
    ci95 = None if rate is None else (rate * 0.99, rate * 1.01)
    return replace(row, **{"kind": "confirm", "samples_per_s": rate, "ci95": ci95, **more})


def of(found: Leaderboard, place: int) -> Entry:
    """The entry of the grid's point at this place."""
    return next(entry for entry in found.entries if entry.point == FOUR.points[place].id)


def told(found: Leaderboard, words: str) -> bool:
    return any(words in note for note in found.notes)


def test_a_real_sweep_has_one_entry_a_point_and_ends_of_each_kind() -> None:
    sweep = made.sweep_file()
    found = leaderboard(sweep, Rows(tuple(made.rows(sweep))))
    assert sorted(entry.point for entry in found.entries) == sorted(sweep.ids)
    ends = dict.fromkeys(("oom", "infeasible", "invalid", "timeout", "failed", "killed", "pending"), 1)
    assert found.counts == {"ok": 17, **ends}
    assert list(found.counts) == ["ok", *ends]
    assert [entry.status for entry in found.entries[17:]] == list(ends)
    assert [entry.runs for entry in found.ranked[:4]] == [4, 4, 4, 1]
    json.dumps(found.to_dict(), allow_nan=False)


def test_intervals_that_overlap_the_leaders_share_its_rank() -> None:
    found = board(*rated(1000, 985, 970, 900))
    assert [entry.label for entry in found.entries] == ["1=", "1=", "3", "4"]
    # 970 overlaps 985, but not the leader: it leads the next group.
    assert found.entries[2].ci95 == pytest.approx((960.3, 979.7))


def test_a_rank_without_an_interval_is_a_guess() -> None:
    found = board(*rated(1000, 990, own=None))
    assert [entry.label for entry in found.entries] == ["1?", "2?", "", ""]


@given(st.lists(st.none() | st.floats(1, 1e6), min_size=4, max_size=4), st.none() | st.floats(0, 0.5))
def test_ranks_follow_rates(rates: list[float | None], own: float | None) -> None:
    found = board(*rated(*rates, own=own))
    assert len(found.entries) == 4
    speeds = [entry.row.samples_per_s for entry in found.ranked]
    assert speeds == sorted((rate for rate in rates if rate is not None), reverse=True)
    ranks = [entry.rank for entry in found.ranked]
    assert ranks == sorted(ranks)
    assert ranks[:1] in ([], [1])
    shared = [entry.tie == "=" for entry in found.ranked]
    assert shared == [ranks.count(rank) > 1 for rank in ranks]
    assert all(0 < entry.of_best <= 1 for entry in found.ranked)


def test_confirms_are_averaged_with_the_trial() -> None:
    first, *rest = rated(1000, 500, 400, 300)
    found = board(first, *rest, confirm(first, 980), confirm(first, 990))
    assert of(found, 0).row.samples_per_s == pytest.approx(990)
    assert of(found, 0).runs == 3
    assert found.noise is not None
    assert found.noise.degrees == 2
    assert told(found, "Between runs of the same settings")


def test_confirms_by_other_code_do_not_count() -> None:
    first, *_ = rated(1000)
    found = board(first, confirm(first, 10, code="other"))
    assert (of(found, 0).row.samples_per_s, of(found, 0).runs) == (1000, 1)
    assert found.noise is None


def test_ratios_are_to_the_best_and_to_the_same_point_with_the_baseline_loader() -> None:
    sweep = made.sweep_file({"loader": ("baseline", "fast"), "size": ("1", "2")})
    found = board(*rated(100, 200, 300, 400, sweep=sweep), sweep=sweep)
    figures = {tuple(e.values.values()): (e.of_best, e.of_baseline) for e in found.entries}
    assert figures == {
        ("baseline", "1"): (0.25, 1.0),
        ("baseline", "2"): (0.5, 1.0),
        ("fast", "1"): (0.75, 3.0),
        ("fast", "2"): (1.0, 2.0),
    }


def test_points_whose_secrets_were_hidden_are_found_by_their_ids() -> None:
    real = made.sweep_file({"token": ("s3cret", "t0psecret")})
    hidden = replace(real, space={"token": Choices(("***", "***"))})
    found = board(*rated(100, 200, sweep=real), sweep=hidden)
    assert [(entry.point, entry.row.samples_per_s) for entry in found.ranked] == [
        (real.ids[1], 200),
        (real.ids[0], 100),
    ]
    assert not told(found, "earlier grids")
    assert {entry.values["token"] for entry in found.entries} == {"***"}
    assert "s3cret" not in json.dumps([dict(entry.values) for entry in found.entries])


@pytest.mark.parametrize("rate", [None, 0.0, float("nan")])
def test_a_trial_that_ended_well_without_a_usable_rate_has_no_rank(rate: float | None) -> None:
    found = board(replace(rated(100)[0], samples_per_s=rate))
    assert (of(found, 0).status, of(found, 0).rank) == ("ok", None)


def test_a_factor_over_the_baseline_has_an_interval_where_both_were_measured_again() -> None:
    sweep = made.sweep_file({"loader": ("baseline", "slow", "fast")})

    def shown(*rows: Row) -> dict[str, str]:
        found = board(*rows, sweep=sweep)
        (column,) = [column for column in columns(found) if column.head == "vs baseline"]
        return {entry.values["loader"]: column.text(entry) for entry in found.entries}

    for own, slow, fast in (
        (0.01, "1.22x (1.21 to 1.23)", "3.00x (2.97 to 3.03)"),
        (0.2, "tied", "3.00x (2.46 to 3.66)"),
    ):
        rows = rated(100, 122, 300, own=own, sweep=sweep)
        again = [replace(row, kind="confirm") for row in rows]
        once = {"baseline": "1x", "slow": "1.22x?", "fast": "3.00x?"}
        assert shown(*rows) == shown(*rows, *again[1:]) == shown(*rows, again[0]) == once
        assert shown(*rows, again[0], again[2]) == {**once, "fast": fast}
        assert shown(*rows, *again) == {**once, "slow": slow, "fast": fast}


def test_other_code_than_that_of_the_last_command_is_noted() -> None:
    rows = [replace(row, code="abc") for row in rated(10.0, 20.0)]
    found = board(*rows, sweep=replace(FOUR, code="def"))
    assert found.code == "abc"
    assert told(found, "other versions of the code: abc; the last command had def")
    assert board(sweep=replace(FOUR, code="def")).code == "def"
    assert not told(board(*rows, sweep=replace(FOUR, code="abc")), "versions of the code")
