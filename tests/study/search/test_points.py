"""Which points a search tries, with real rows and a real study of Optuna."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna")

from tests.kit.made_rows import folder_name, write_rows
from wellfed.config.schema import SearchConfig, SearchPruner, SearchSampler
from wellfed.record.entries import RunRecord
from wellfed.study.objective import of_metric
from wellfed.study.points.grid import Grid
from wellfed.study.points.space import Choices, Numbers, Space
from wellfed.study.rows import Kept, Row
from wellfed.study.search.asked_points import AskedPoints
from wellfed.study.search.points import GridPoints, Points, Proposal
from wellfed.study.trial_end import TrialMetric

WIDE: Space = {"lr": Numbers(1e-4, 1e-1, is_log=True), "width": Numbers(1, 9, step=2), "dim": Choices(("32", "64"))}
FINITE: Space = {"dim": Choices(("1", "2", "3")), "loader": Choices(("a", "b"))}
ENDLESS: Space = {"lr": Numbers(0.1, 0.9)}


SCORE = TrialMetric("score", "max")


def kept(folder: Path, retry: tuple[str, ...] = ()) -> Kept:
    return Kept(folder, of_metric("score", higher_is_better=True), "abc", retry, metric=SCORE)


def opened(
    folder: Path, space: Space, retry: tuple[str, ...] = (), *, mode: str = "max", **more: Any
) -> tuple[AskedPoints, Kept]:
    """As a command opens the search of a folder."""
    options = SearchConfig(**{"sampler": SearchSampler.tpe, "max_trials": 99, **more})
    rows = kept(folder, retry)
    return AskedPoints(space, ("seed=1",), rows, options, mode), rows


def ended(points: Points, rows: Kept, proposal: Proposal, curve: Sequence[float] = (0.5,), **more: Any) -> Row:
    """The trial has ended, and well unless said otherwise."""
    number, point = proposal
    made = Row(point.id, "trial", point.overrides, **{"status": "ok", "exit_code": 0, "trial": number, **more})
    write_rows(rows.folder, [made], events=[{"kind": "pruned"}] if more.get("outcome") == "pruned" else [])
    lines = [f"{step},val,score,{value}" for step, value in enumerate(curve, start=1)]
    (rows.folder / folder_name(made) / "metrics.csv").write_text("\n".join(["step,split,name,value", *lines]) + "\n")
    rows.found = kept(rows.folder).found
    row = rows.latest[point.id]
    points.ended(row)
    return row


def all_of(points: AskedPoints, rows: Kept, **more: Any) -> list[Mapping[str, str]]:
    tried = []
    while (proposal := points.next()) is not None:
        tried.append(proposal[1].values)
        ended(points, rows, proposal, **more)
    return tried


def test_each_point_of_a_finite_space_is_tried_once(tmp_path: Path) -> None:
    points, rows = opened(tmp_path, FINITE)
    tried = all_of(points, rows)
    assert len(tried) == 6
    assert not points.has_more
    assert len({tuple(values.items()) for values in tried}) == 6
    again, _ = opened(tmp_path, FINITE)
    assert again.next() is None


def test_it_ends_with_the_most_trials_and_goes_on_with_more(tmp_path: Path) -> None:
    points, rows = opened(tmp_path, ENDLESS, max_trials=3)
    first = all_of(points, rows)
    assert len(first) == 3
    points, rows = opened(tmp_path, ENDLESS, max_trials=5)
    assert len(all_of(points, rows)) == 2
    assert sorted(row.trial or 0 for row in rows.found.rows) == [0, 1, 2, 3, 4]


def begun(folder: Path, proposal: Proposal, status: Any = "running") -> RunRecord:
    """The record of a trial that was running, or had just ended, when its command was killed."""
    made = RunRecord.start(proposal[1].id)
    made.overrides, made.status = [*proposal[1].overrides], status
    made.exit_code = None if status == "running" else 1
    (folder / proposal[1].id).mkdir()
    made.write(folder / proposal[1].id)
    return made


def test_what_ran_when_the_command_was_killed_is_tried_again_first(tmp_path: Path) -> None:
    points, rows = opened(tmp_path, ENDLESS)
    done, lost = points.next(), points.next()
    assert done is not None
    assert lost is not None
    ended(points, rows, done)
    begun(tmp_path, lost)
    points, rows = opened(tmp_path, ENDLESS)
    again = points.next()
    assert again is not None
    assert again[1] == lost[1]
    assert again[0] > done[0]


def test_each_point_to_retry_is_tried_once_more_beside_what_was_lost(tmp_path: Path) -> None:
    """One was lost in a kill, two have failed, and Optuna has all three waiting."""
    points, rows = opened(tmp_path, ENDLESS, max_trials=3)
    failed, lost, other = points.next(), points.next(), points.next()
    assert failed is not None
    assert lost is not None
    assert other is not None
    for each in (failed, other):
        ended(points, rows, each, (), status="killed", exit_code=-9)
    begun(tmp_path, lost)
    points, rows = opened(tmp_path, ENDLESS, retry=("killed",), max_trials=3)
    again = all_of(points, rows)
    assert sorted(map(str, again)) == sorted(str(each[1].values) for each in (failed, lost, other))
    assert [row.status for row in rows.latest.values()] == ["ok"] * 3
    points, rows = opened(tmp_path, ENDLESS, max_trials=4)
    assert len(all_of(points, rows)) == 1


def test_a_trial_that_ended_just_when_the_command_was_killed_is_a_row_once(tmp_path: Path) -> None:
    points, rows = opened(tmp_path, FINITE)
    proposal = points.next()
    assert proposal is not None
    made = begun(tmp_path, proposal, "failed")
    for _ in range(2):
        _, rows = opened(tmp_path, FINITE)
        (row,) = rows.found.rows
        assert (row.status, row.started_at) == ("failed", made.started_at)
    retried, _ = opened(tmp_path, FINITE, retry=("failed",))
    again = retried.next()
    assert again is not None
    assert again[1] == proposal[1]


def test_a_grid_is_gone_through_in_order_and_goes_on(tmp_path: Path) -> None:
    made = Grid({"dim": ("1", "2", "3")}, ("seed=1",)).points()
    rows = kept(tmp_path)
    points = GridPoints(made, rows)
    first = points.next()
    assert first is not None
    assert first[1] == made[0]
    assert points.has_more
    ended(points, rows, first)
    second = points.next()
    assert second is not None
    ended(points, rows, second, (), status="interrupted", exit_code=143)
    points = GridPoints(made, kept(tmp_path))
    left = [points.next(), points.next(), points.next()]
    assert [None if each is None else each[1].values["dim"] for each in left] == ["2", "3", None]


def test_a_grid_that_grows_gives_no_number_twice(tmp_path: Path) -> None:
    rows = kept(tmp_path)
    points = GridPoints(Grid({"dim": ("2", "3")}, ("seed=1",)).points(), rows)
    for status in ("ok", "killed"):
        proposal = points.next()
        assert proposal is not None
        ended(points, rows, proposal, status=status)
    grown = Grid({"dim": ("1", "2", "3", "4")}, ("seed=1",)).points()
    points = GridPoints(grown, kept(tmp_path, retry=("killed",)))
    left = [points.next(), points.next(), points.next()]
    assert [(each[1].values["dim"], each[0]) for each in left if each] == [("1", 2), ("3", 1), ("4", 3)]


# -- Optuna: what it asks for lies in the space, and what earlier commands have found counts --------------------------


@pytest.mark.parametrize("sampler", [SearchSampler.tpe, SearchSampler.random])
def test_what_is_asked_lies_in_the_space(tmp_path: Path, sampler: SearchSampler) -> None:
    points, rows = opened(tmp_path, WIDE, sampler=sampler)
    seen: list[float] = []
    for number in range(25):
        proposal = points.next()
        assert proposal is not None
        assert proposal[0] == number
        values = proposal[1].values
        assert 1e-4 <= float(values["lr"]) <= 1e-1
        assert values["width"] in ("1", "3", "5", "7", "9")
        assert values["dim"] in ("32", "64")
        seen.append(math.log10(float(values["lr"])))
        ended(points, rows, proposal, [-abs(seen[-1] + 2)])
    assert min(seen) < -3 < max(seen)  # by powers: evenly it would be one in ninety
    if sampler is SearchSampler.tpe:
        assert sum(abs(power + 2) for power in seen[15:]) < sum(abs(power + 2) for power in seen[:10])


@pytest.mark.parametrize(("mode", "best"), [("max", 0.8), ("min", 0.2)])
def test_it_nears_what_the_mode_calls_best(tmp_path: Path, mode: str, best: float) -> None:
    points, rows = opened(tmp_path, {"x": Numbers(0.2, 0.8)}, mode=mode)
    tried: list[float] = []
    for _ in range(35):
        proposal = points.next()
        assert proposal is not None
        tried.append(float(proposal[1].values["x"]))
        ended(points, rows, proposal, [tried[-1]])
    assert abs(sum(tried[15:]) / 20 - best) < 0.2  # drawn evenly it would be 0.3


def curve_of(points: AskedPoints, rows: Kept, top: float, epochs: int = 9) -> int:
    """Validations until a trial with this curve is ended."""
    proposal = points.next()
    assert proposal is not None
    curve: list[float] = []
    for epoch in range(1, epochs + 1):
        curve.append(top * epoch)
        if points.prune(proposal[1], epoch, curve[-1]):
            ended(points, rows, proposal, curve, outcome="pruned")
            return epoch
    ended(points, rows, proposal, curve)
    return epochs


@pytest.mark.parametrize(("mode", "sign"), [("max", 1), ("min", -1)])
def test_median_ends_what_falls_behind_from_the_second_validation_on(tmp_path: Path, mode: str, sign: int) -> None:
    points, rows = opened(tmp_path, ENDLESS, mode=mode, pruner=SearchPruner.median)
    assert [curve_of(points, rows, sign * top) for top in (1, 2, 3, 4, 5)] == [9] * 5
    points, rows = opened(tmp_path, ENDLESS, mode=mode, pruner=SearchPruner.median)  # another command knows them
    assert curve_of(points, rows, sign * 1.5) == 2
    assert curve_of(points, rows, sign * 6) == 9


def test_no_pruner_ends_nothing_and_nan_is_no_figure(tmp_path: Path) -> None:
    points, rows = opened(tmp_path, ENDLESS)
    assert [curve_of(points, rows, top) for top in (5, 4, 3, 2, 1, 0, -1, -2)] == [9] * 8
    points, rows = opened(tmp_path, ENDLESS, pruner=SearchPruner.median)
    proposal = points.next()
    assert proposal is not None
    assert points.prune(proposal[1], 2, math.nan) is None


def test_trials_of_an_earlier_command_count_for_the_sampler(tmp_path: Path) -> None:
    points, rows = opened(tmp_path, {"x": Numbers(0.2, 0.8)})
    for _ in range(30):
        proposal = points.next()
        assert proposal is not None
        ended(points, rows, proposal, [float(proposal[1].values["x"])])
    again, _ = opened(tmp_path, {"x": Numbers(0.2, 0.8)})
    asked = [proposal for _ in range(10) if (proposal := again.next()) is not None]
    assert sum(float(point.values["x"]) for _, point in asked) / 10 > 0.55  # drawn evenly it would be 0.5
