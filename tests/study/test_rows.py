"""What a sweep keeps of its rows: what is missing, what is best by its objective, what is measured again."""

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.kit import made
from tests.kit.composed import compose
from tests.kit.made_rows import write_rows
from wellfed.errors import ConfigError
from wellfed.record.entries import RunRecord, Status
from wellfed.run.folder.resume import Target
from wellfed.run.folder.run_folder import RunFolder
from wellfed.run.train import begin_record
from wellfed.study.objective import SAMPLES_PER_S
from wellfed.study.ranking.ranking import board_of
from wellfed.study.rows import Kept, Row, Rows, read_rows
from wellfed.study.study import StudyScreen, Trials
from wellfed.study.trial_end import TrialMetric

ANY: Any = None
AXES = {"loader": ("baseline", "conservative", "balanced", "aggressive")}
POINTS = SLOW, THRIFTY, FAST, FASTEST = made.sweep_file(AXES).points
IDS = [point.id for point in POINTS]
ROWS = [
    made.row(point, rate, energy_per_sample_j=joules, peak_memory_gib=peak)
    for point, rate, joules, peak in zip(
        POINTS, (100.0, 200.0, 300.0, 400.0), (0.04, 0.01, 0.03, None), (1.0, 2.0, 3.0, 4.0), strict=True
    )
]


def kept(folder: Path, rows: Sequence[Row] = ROWS, objective: str = "samples_per_s", retry: Sequence[str] = ()) -> Kept:
    file = made.sweep_file(AXES, objective=objective)
    folder.mkdir(exist_ok=True)
    write_rows(folder, rows)
    return Kept(folder, file.ranked_by, file.code, retry, file.ids)


def shown(rows: Kept) -> Trials:
    """The same rows, and a terminal that shows what is added."""
    return Trials(rows, StudyScreen(rows.objective, [*AXES], "triplets"), ANY)


@pytest.mark.parametrize(
    ("objective", "best"),
    [
        ("samples_per_s", [FASTEST, FAST, THRIFTY]),
        ("samples_per_joule", [THRIFTY, FAST, SLOW]),
        ("peak_memory", [SLOW, THRIFTY, FAST]),
    ],
)
def test_the_three_best_by_the_objective_are_measured_again_in_turn(
    tmp_path: Path, objective: str, best: list[made.GridPoint]
) -> None:
    rows = kept(tmp_path, objective=objective)
    first, second, third = (point.id for point in best)
    turn = [first, second, third]
    best_row = rows.best()
    assert best_row is not None
    assert best_row.point == first
    assert rows.to_confirm(IDS) == [*turn, *turn[::-1], *turn]
    assert rows.to_confirm([second, third]) == [second, third, third, second, second, third]
    assert rows.to_confirm([third]) == []


def test_what_can_not_confirm_is_not_measured_over_and_over(tmp_path: Path) -> None:
    """Trials of other code."""
    old = [replace(row, code="old") for row in ROWS[2:]]
    assert kept(tmp_path / "old", [*ROWS[:2], *old]).to_confirm(IDS) == [
        THRIFTY.id,
        SLOW.id,
        SLOW.id,
        THRIFTY.id,
        THRIFTY.id,
        SLOW.id,
    ]
    assert kept(tmp_path / "all", old).to_confirm(IDS) == []


def row(point: str = "a", status: Status = "ok", **known: Any) -> Row:
    figures = {"exit_code": None if status in ("invalid", "infeasible") else 0, "started_at": "2026-11-21", **known}
    return Row(point, "trial", (f"seed={point}",), status, **figures)


def test_the_trial_of_a_point_is_its_latest_row_and_those_after_it_confirm_it() -> None:
    def again(attempt: int, code: str = "x") -> Row:
        return replace(row("b", attempt=attempt, code=code), kind="confirm")

    found = Rows([row("a", "oom"), again(1), row("b", code="x"), again(2), again(3, "y")])
    assert {point: each.status for point, each in found.latest.items()} == {"a": "oom", "b": "ok"}
    assert [each.attempt for each in found.confirms("b")] == [2]
    found.add(row("a", attempt=2))
    assert [(each.point, each.attempt) for each in found.rows if each.kind == "trial"] == [("b", 1), ("a", 2)]


def test_a_record_that_can_not_be_read_costs_its_trial_alone(tmp_path: Path) -> None:
    write_rows(tmp_path, [row("a"), row("b"), row("c", "oom", exit_code=3)])
    (tmp_path / "b" / "run.json").write_text('{"run_id": ')
    (tmp_path / "c.attempt1").mkdir()
    (tmp_path / "c.attempt1" / "run.json").write_text((tmp_path / "a" / "run.json").read_text())
    whole = json.loads((tmp_path / "a" / "run.json").read_text())
    for name, trial in {"d": {"code": "x"}, "e": [1], "f": "text"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps({**whole, "trial": trial}))
    assert [(each.point, each.status) for each in read_rows(tmp_path).rows] == [("a", "ok"), ("c", "oom")]
    assert Kept(tmp_path, SAMPLES_PER_S, "abc").missing(["a", "b", "c"]) == ["b"]


@pytest.mark.parametrize(("status", "exit_code"), [("running", None), ("killed", None), ("interrupted", 143)])
def test_a_trial_that_ended_well_keeps_its_row_while_a_resume_of_it_is_cut_short(
    tmp_path: Path, status: Status, exit_code: int | None
) -> None:
    write_rows(tmp_path, [row("a", trial=0)])
    earlier = RunRecord.read(tmp_path / "a")
    target = Target(tmp_path / "a" / "checkpoints" / "last.ckpt", in_place=True, earlier=earlier)
    for _ in range(2):  # resumed, cut short, and resumed again
        record = begin_record(compose(), RunFolder(tmp_path / "a", is_new=False), target)
        record.status, record.exit_code = status, exit_code
        target = replace(target, earlier=record)
    record.overrides, record.duration_s = earlier.overrides, 9.0
    record.write(tmp_path / "a")
    (tmp_path / "a" / "metrics.csv").write_text("step,epoch,time_s,split,name,value\n5,0,1,val,loss,0.25\n")
    kept = Kept(tmp_path, SAMPLES_PER_S, "abc", metric=TrialMetric("loss", "min"))
    (found,) = kept.found.rows
    assert (found.status, found.outcome, found.value, found.trial) == ("ok", "complete", 0.25, 0)
    assert found.seconds == 9.0
    assert kept.missing(["a"]) == []


def test_a_trial_that_failed_and_is_cut_short_after_a_resume_is_run_again(tmp_path: Path) -> None:
    write_rows(tmp_path, [row("a", "interrupted", trial=0, exit_code=143)])
    assert Kept(tmp_path, SAMPLES_PER_S, "abc").missing(["a"]) == ["a"]
    target = Target(tmp_path / "a" / "checkpoints" / "last.ckpt", True, RunRecord.read(tmp_path / "a"))
    begin_record(compose(), RunFolder(tmp_path / "a", is_new=False), target).write(tmp_path / "a")
    assert Kept(tmp_path, SAMPLES_PER_S, "abc").missing(["a"]) == ["a"]


@pytest.mark.parametrize("status", [status for status in get_args(Status) if status != "running"])
def test_what_the_same_command_runs_again(tmp_path: Path, status: Status) -> None:
    write_rows(tmp_path, [row("a", status)])
    never_ran = status in ("invalid", "infeasible", "interrupted")
    assert Kept(tmp_path, SAMPLES_PER_S, "abc").missing(["a"]) == (["a"] if never_ran else [])
    assert Kept(tmp_path, SAMPLES_PER_S, "abc", [status]).missing(["a"]) == ["a"]


@pytest.mark.slow
def test_a_board_of_two_thousand_trials_is_there_within_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    file = made.sweep_file({"workload.optimizer.lr": [str(number) for number in range(2000)]})
    plan = {f"loader.knob{number}": {"value": number, "because": "measured " * 20} for number in range(50)}
    write_rows(tmp_path, [made.row(point) for point in file.points], plan=plan)  # 13 kB each, as a run's are
    file.write(tmp_path)
    began_s = time.process_time()
    assert len(board_of(tmp_path).ranked) == 2000
    assert time.process_time() - began_s < 3


def test_a_refusal_takes_no_measured_row_away_and_is_written_once(tmp_path: Path) -> None:
    rows = kept(tmp_path, [ROWS[0]])
    for point in (SLOW, FAST):
        for _ in range(2):
            shown(rows).refuse(point, ConfigError.of("gpu.memory_gib", "is too small", "Raise it."))
    assert [(row.point, row.status) for row in read_rows(tmp_path).rows] == [(SLOW.id, "ok"), (FAST.id, "invalid")]
