"""What a search does with the ends of its trials: when it goes on, when it stops, what it writes and says."""

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna")

from tests.kit.played_trials import PlayedTrials, row_of
from wellfed.config.schema import RunConfig, SearchConfig, SearchPruner, SearchSampler, TrainerConfig
from wellfed.errors import ConfigError
from wellfed.study.objective import of_metric
from wellfed.study.points.space import Axis, Choices, Numbers
from wellfed.study.request import StudyRequest
from wellfed.study.rows import Row, read_rows
from wellfed.study.search.searching import SearchStudy
from wellfed.study.study import StudyScreen
from wellfed.study.trial_end import Trial, TrialMetric


@pytest.fixture(autouse=True)
def typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py"])


LR, KEY = "workload.optimizer.lr", "workload.data.api_key"
ANY: Any = None
COMPOSED: Any = None
"""Configuration of trials that are only played."""


@dataclass
class Composing:
    """Composes every point but those with one of the ``bad`` overrides."""

    bad: Sequence[str] = ()
    flags: Sequence[str] = ()

    def compose(self, overrides: Sequence[str], folder: Path) -> Any:
        if {*self.bad} & {*overrides}:
            raise ConfigError.of(LR, "is negative.", "Take a positive one.")
        return COMPOSED


def value_of(trial: Trial) -> float:
    """The metric is the value of the first axis."""
    return float(trial.point.overrides[-1].partition("=")[2])


def once(trial: Trial) -> list[float]:
    return [value_of(trial)]


def failed(trial: Trial, **more: Any) -> Row:
    error = {"kind": "code", "message": "KeyError: 'x'", "advice": ""}
    return row_of(trial, **{"status": "failed", "exit_code": 1, "error": error, **more})


class Searching:
    """A search in a folder, whose trials are played."""

    def __init__(
        self,
        folder: Path,
        play: Callable[[Trial], Row] = row_of,
        values: Sequence[str] = (),
        *,
        curve: Callable[[Trial], Sequence[float]] = once,
        composing: Composing | None = None,
        space: dict[str, Axis] | None = None,
        best_metric: str | None = None,
        shared: Sequence[str] = ("seed=1",),
        metric: str = "score",
        **options: Any,
    ) -> None:
        is_grid = space is None
        space = space or {LR: Choices(tuple(values))}
        sampler = SearchSampler.grid if is_grid else SearchSampler.random
        search = SearchConfig(**{"sampler": sampler, "pruner": SearchPruner.none, "max_trials": 20, **options})
        config = RunConfig(search=search, trainer=TrainerConfig(best_metric=best_metric))
        asked = StudyRequest("mine", folder, space, tuple(shared))
        screen = StudyScreen(of_metric("score", higher_is_better=True), list(space))
        multirun: Any = composing or Composing()
        self.study = SearchStudy(folder, screen, multirun, config, asked, None, COMPOSED)
        self.study.__dict__["code"] = "abc"
        earlier = self.study.earlier()
        self.trials = self.study.begin(TrialMetric(metric, "max"), earlier)
        self.played = PlayedTrials(folder, play, curve)
        self.points = self.study.propose(self.trials, parallel=1)

    def run(self) -> int:
        self.study.serve(self.played, self.points, self.trials)
        return self.study.finish()

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        found = read_rows(self.study.folder, TrialMetric("score", "max")).rows
        return [(row.overrides[-1].partition("=")[2], row.status, row.outcome) for row in found]


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_the_trials_of_a_grid_are_ranked_by_their_metric(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert Searching(tmp_path, values=("0.1", "0.3", "0.2")).run() == 0
    out = lines(capsys)
    assert out[1].startswith("trial 1 complete score 0.3 (best so far)")
    assert "(best so far)" not in out[2]
    with (tmp_path / "leaderboard.csv").open(newline="") as stream:
        table = list(csv.DictReader(stream))
    assert [(row["rank"], row["trial"], row["value"]) for row in table] == [
        ("1", "1", "0.3"), ("2", "2", "0.2"), ("3", "0", "0.1"),
    ]  # fmt: skip


def test_the_same_command_again_runs_what_is_missing(tmp_path: Path) -> None:
    searching = Searching(tmp_path, values=("0.1", "0.2", "0.3"))

    def lost_after_one(trial: Trial) -> Row:
        if searching.played.ran[1:]:
            raise KeyboardInterrupt
        return row_of(trial)

    searching.played = PlayedTrials(tmp_path, lost_after_one, once)
    with pytest.raises(KeyboardInterrupt):
        searching.run()
    again = Searching(tmp_path, values=("0.1", "0.2", "0.3"))
    assert again.run() == 0
    assert [trial.point.overrides[-1] for trial in again.played.ran] == [f"{LR}=0.2", f"{LR}=0.3"]
    assert len(again.rows) == 3


def test_a_point_that_does_not_compose_is_a_row_and_the_rest_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    composing = Composing([f"{LR}=-1"])
    for _ in range(2):  # and the same command again writes no second row
        assert Searching(tmp_path, values=("-1", "0.2"), composing=composing).run() == 0
    assert Searching(tmp_path, values=("-1", "0.2")).rows == [("-1", "invalid", "failed"), ("0.2", "ok", "complete")]
    assert any(f"invalid: {LR}=-1" in line and "is negative" in line for line in lines(capsys))


def test_without_the_metric_nothing_can_be_ranked_and_the_names_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def silent(trial: Trial) -> Row:
        folder = tmp_path / trial.folder
        folder.mkdir()
        (folder / "metrics.csv").write_text("step,epoch,time_s,split,name,value\n4,0,1,val,loss,0.5\n")
        return row_of(trial)

    searching = Searching(tmp_path, silent, ("0.1", "0.2"), curve=lambda trial: ())
    assert searching.run() == 1
    assert len(searching.rows) == 1
    (said,) = [line for line in lines(capsys) if line.startswith("Stopped")]
    assert "validation gives no score, so no training can be ranked. It gives: loss." in said


def test_a_metric_that_the_first_trial_refuses_is_a_fault_of_the_command(tmp_path: Path) -> None:
    message = "trainer.best_metric=auc: validation has no such figure."

    def refused(trial: Trial) -> Row:
        return failed(trial, status="invalid", error={"kind": "config", "message": message, "advice": ""})

    with pytest.raises(ConfigError, match=r"trainer\.best_metric=auc: validation has no such figure"):
        Searching(tmp_path, refused, ("0.1", "0.2"), best_metric="auc").run()


def test_when_the_time_is_over_what_runs_ends_and_nothing_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    searching = Searching(tmp_path, values=("0.1", "0.2", "0.3"), max_minutes=1.0)

    def last(trial: Trial) -> Row:
        searching.study.until_s = 0.0
        return row_of(trial)

    searching.played = PlayedTrials(tmp_path, last, once)
    assert searching.run() == 0
    assert len(searching.rows) == 1
    assert "search.max_minutes=1 are over. The same command goes on, for as long again." in lines(capsys)


def test_a_training_worse_than_most_is_pruned_and_the_best_never_is(tmp_path: Path) -> None:
    """With the real pruner of Optuna: the metric of each trial is flat at its learning rate."""
    options: dict[str, Any] = {"space": {LR: Numbers(0.1, 0.9)}, "max_trials": 16, "pruner": SearchPruner.median}

    searching = Searching(tmp_path, curve=lambda trial: [value_of(trial)] * 4, **options)
    assert searching.run() == 0
    rows = read_rows(tmp_path, TrialMetric("score", "max")).rows
    pruned = {row.folder for row in rows if row.outcome == "pruned"}
    assert pruned == set(searching.played.pruned)
    assert 0 < len(pruned) < 11  # the first five train to their end
    assert max(rows, key=lambda row: row.value or 0).folder not in pruned
    assert {*searching.played.pruned.values()} == {"search.pruner=median after validation 2"}
    with (tmp_path / "leaderboard.csv").open(newline="") as stream:
        table = list(csv.DictReader(stream))
    assert {row["folder"] for row in table if not row["rank"]} == pruned
    again = Searching(tmp_path, curve=lambda trial: [value_of(trial)] * 4, **options)
    assert again.run() == 0
    assert again.played.ran == []


@pytest.mark.parametrize(
    ("space", "options", "told"),
    [
        ({LR: Numbers(0.1, 0.8)}, {}, f"space {LR}: 0.1 to 0.9; this one has space {LR}: 0.1 to 0.8."),
        ({LR: Numbers(0.1, 0.9)}, {"shared": ("seed=2",)}, "overrides seed=1; this one has overrides seed=2."),
        ({LR: Numbers(0.1, 0.9)}, {"metric": "loss"}, "metric val/score (max); this one has metric val/loss (max)."),
        (None, {}, "search.sampler=random; this one has search.sampler=grid."),
    ],
)  # fmt: skip
def test_another_search_in_the_folder_is_refused_with_both_and_nothing_is_touched(
    tmp_path: Path, space: dict[str, Axis] | None, options: dict[str, Any], told: str
) -> None:
    assert Searching(tmp_path, space={LR: Numbers(0.1, 0.9)}, max_trials=2).run() == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError) as caught:
        Searching(tmp_path, values=("0.1", "0.2"), space=space, max_trials=3, **options)
    assert told in str(caught.value)
    assert "search.name=mine_2" in str(caught.value)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
