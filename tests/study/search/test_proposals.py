"""Which points a search tries, with a real ledger and a real study of Optuna."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna")

from wellfed.record.entries import RunRecord
from wellfed.study.ledger import Ledger
from wellfed.study.objective import of_metric
from wellfed.study.points.grid import Grid
from wellfed.study.points.optuna_study import OptunaStudy
from wellfed.study.points.space import Choices, Numbers, Space
from wellfed.study.row import Row, TrialMetric
from wellfed.study.search.proposals import AskedPoints, GridPoints, Points, Proposal

FINITE: Space = {"dim": Choices(("1", "2", "3")), "loader": Choices(("a", "b"))}
ENDLESS: Space = {"lr": Numbers(0.1, 0.9)}


SCORE = TrialMetric("score", "max")


def kept(folder: Path, retry: tuple[str, ...] = ()) -> Ledger:
    ranked_by = of_metric("score", higher_is_better=True)
    return Ledger(folder, ranked_by, "abc", retry, metric=SCORE)


def opened(
    folder: Path, space: Space, retry: tuple[str, ...] = (), *, seed: int = 1, **more: Any
) -> tuple[AskedPoints, Ledger]:
    """As a command opens the search of a folder."""
    ledger = kept(folder, retry)
    study = OptunaStudy(space, mode="max", sampler="tpe", pruner="none", seed=seed + len(ledger.found.rows))
    return AskedPoints(study, space, ("seed=1",), ledger, **{"most": 99, "pruner": "none", **more}), ledger


def ended(points: Points, ledger: Ledger, proposal: Proposal, **more: Any) -> Row:
    """The trial has ended, and well unless said otherwise."""
    good = {"status": "ok", "outcome": "complete", "value": 0.5}
    row = replace(ledger.begin(proposal[1], "trial", proposal[0]), **{**good, **more})
    ledger.append(row)
    points.ended(row)
    return row


def all_of(points: AskedPoints, ledger: Ledger, **more: Any) -> list[Mapping[str, str]]:
    tried = []
    while (proposal := points.next()) is not None:
        tried.append(proposal[1].values)
        ended(points, ledger, proposal, **more)
    return tried


def test_each_point_of_a_finite_space_is_tried_once(tmp_path: Path) -> None:
    points, ledger = opened(tmp_path, FINITE)
    tried = all_of(points, ledger)
    assert len(tried) == 6
    assert not points.has_more
    assert len({tuple(values.items()) for values in tried}) == 6
    again, _ = opened(tmp_path, FINITE)
    assert again.next() is None


def test_it_ends_with_the_most_trials_and_goes_on_with_more(tmp_path: Path) -> None:
    points, ledger = opened(tmp_path, ENDLESS, most=3)
    first = all_of(points, ledger)
    assert len(first) == 3
    points, ledger = opened(tmp_path, ENDLESS, most=5)
    assert len(all_of(points, ledger)) == 2
    assert [row.trial for row in ledger.found.rows] == [0, 1, 2, 3, 4]


def begun(folder: Path, proposal: Proposal, status: Any = "running") -> RunRecord:
    """The record of a trial that was running, or had just ended, when its command was killed."""
    made = RunRecord.start(proposal[1].id)
    made.overrides, made.status = [*proposal[1].overrides], status
    made.exit_code = None if status == "running" else 1
    (folder / proposal[1].id).mkdir()
    made.write(folder / proposal[1].id)
    return made


def test_what_ran_when_the_command_was_killed_is_tried_again_first(tmp_path: Path) -> None:
    points, ledger = opened(tmp_path, ENDLESS)
    done, lost = points.next(), points.next()
    assert done is not None
    assert lost is not None
    ended(points, ledger, done)
    begun(tmp_path, lost)
    points, ledger = opened(tmp_path, ENDLESS)
    again = points.next()
    assert again is not None
    assert again[1] == lost[1]
    assert again[0] > done[0]


def test_each_point_to_retry_is_tried_once_more_beside_what_was_lost(tmp_path: Path) -> None:
    """One was lost in a kill, two have failed, and Optuna has all three waiting."""
    points, ledger = opened(tmp_path, ENDLESS, most=3)
    failed, lost, other = points.next(), points.next(), points.next()
    assert failed is not None
    assert lost is not None
    assert other is not None
    for each in (failed, other):
        ended(points, ledger, each, status="killed", outcome="failed", value=None)
    begun(tmp_path, lost)
    points, ledger = opened(tmp_path, ENDLESS, retry=("killed",), most=3)
    again = all_of(points, ledger)
    assert sorted(map(str, again)) == sorted(str(each[1].values) for each in (failed, lost, other))
    assert [row.status for row in ledger.latest.values()] == ["ok"] * 3
    points, ledger = opened(tmp_path, ENDLESS, most=4)
    assert len(all_of(points, ledger)) == 1


def test_a_trial_that_ended_just_when_the_command_was_killed_is_a_row_once(tmp_path: Path) -> None:
    points, ledger = opened(tmp_path, FINITE)
    proposal = points.next()
    assert proposal is not None
    made = begun(tmp_path, proposal, "failed")
    for _ in range(2):
        _, ledger = opened(tmp_path, FINITE)
        (row,) = ledger.found.rows
        assert (row.status, row.started_at) == ("failed", made.started_at)
    retried, _ = opened(tmp_path, FINITE, retry=("failed",))
    again = retried.next()
    assert again is not None
    assert again[1] == proposal[1]


def test_a_grid_is_gone_through_in_order_and_goes_on(tmp_path: Path) -> None:
    made = Grid({"dim": ("1", "2", "3")}, ("seed=1",)).points()
    ledger = kept(tmp_path)
    points = GridPoints(made, ledger)
    first = points.next()
    assert first is not None
    assert first[1] == made[0]
    assert points.has_more
    ended(points, ledger, first)
    second = points.next()
    assert second is not None
    ended(points, ledger, second, status="interrupted", outcome="failed", value=None)
    points = GridPoints(made, kept(tmp_path))
    left = [points.next(), points.next(), points.next()]
    assert [None if each is None else each[1].values["dim"] for each in left] == ["2", "3", None]


def test_a_grid_that_grows_gives_no_number_twice(tmp_path: Path) -> None:
    ledger = kept(tmp_path)
    points = GridPoints(Grid({"dim": ("2", "3")}, ("seed=1",)).points(), ledger)
    for status in ("ok", "killed"):
        proposal = points.next()
        assert proposal is not None
        ended(points, ledger, proposal, status=status)
    grown = Grid({"dim": ("1", "2", "3", "4")}, ("seed=1",)).points()
    points = GridPoints(grown, kept(tmp_path, retry=("killed",)))
    left = [points.next(), points.next(), points.next()]
    assert [(each[1].values["dim"], each[0]) for each in left if each] == [("1", 2), ("3", 1), ("4", 3)]
