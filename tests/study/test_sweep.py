"""What a sweep does with the ends of its trials: the best again in turns, and where it stops."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kit import made
from tests.kit.played_trials import PlayedTrials, row_of
from wellfed.config.schema import RunConfig, SweepConfig
from wellfed.errors import ConfigError
from wellfed.study.executors.executor import ExecutorLost
from wellfed.study.points.space import Choices
from wellfed.study.request import StudyRequest
from wellfed.study.rows import Kept, Row
from wellfed.study.study import StudyScreen, Trials
from wellfed.study.sweep import SweepStudy
from wellfed.study.trial_end import Trial

RATES = {"baseline": 100.0, "conservative": 200.0, "balanced": 300.0, "aggressive": 400.0}
ANY: Any = None


def good(trial: Trial) -> Row:
    rate = RATES[trial.point.overrides[-1].partition("=")[2]]
    return row_of(trial, samples_per_s=rate, ci95=(rate - 1, rate + 1), device="CPU", seconds=1.0)


def swept(
    folder: Path,
    play: Callable[[Trial], Row] = good,
    **options: Any,
) -> tuple[PlayedTrials, Kept]:
    """What a command ran, and the rows it left."""
    file = made.sweep_file({"loader": tuple(RATES)})
    screen = StudyScreen(file.ranked_by, file.axis_names, file.sample_unit)
    config = RunConfig(sweep=SweepConfig(**options))
    asked = StudyRequest("quick", folder, {"loader": Choices(tuple(RATES))}, file.fixed)
    study = SweepStudy(folder, screen, ANY, config, asked, None)
    kept = Kept(folder, file.ranked_by, file.code, (), file.ids)
    trials, played = Trials(kept, screen, lambda overrides, own: ANY), PlayedTrials(folder, play)
    study.compose(trials, played)
    study.measure(trials, played)
    return played, kept


def test_the_folder_of_a_search_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py"])
    (tmp_path / "search.json").write_text("{}")
    file = made.sweep_file({"loader": tuple(RATES)})
    screen = StudyScreen(file.ranked_by, file.axis_names)
    asked = StudyRequest("quick", tmp_path, {"loader": Choices(tuple(RATES))}, ())
    multirun: Any = SimpleNamespace(flags=())
    study = SweepStudy(tmp_path, screen, multirun, RunConfig(), asked, None)
    with pytest.raises(ConfigError, match=r"holds a search; this is a sweep.*hydra\.sweep\.dir="):
        study.go()
    assert not (tmp_path / "sweep.json").exists()


def loaders(trials: list[Trial], kind: str) -> list[str]:
    return [trial.point.overrides[-1].partition("=")[2] for trial in trials if trial.kind == kind]


def test_the_three_best_and_the_baseline_are_measured_again_in_turns(tmp_path: Path) -> None:
    played, kept = swept(tmp_path)
    assert loaders(played.ran, "trial") == [*RATES]
    turn = ["aggressive", "balanced", "conservative", "baseline"]
    assert loaders(played.ran, "confirm") == [*turn, *turn[::-1], *turn]
    assert [row.folder for row in kept.found.rows[4:6]] == [f"{row.point}.confirm1" for row in kept.found.rows[4:6]]
    again, _ = swept(tmp_path)
    assert again.ran == []


def test_fail_fast_begins_nothing_after_the_first_failure(tmp_path: Path) -> None:
    def second_fails(trial: Trial) -> Row:
        return (
            row_of(trial, status="failed", exit_code=1) if "conservative" in trial.point.overrides[-1] else good(trial)
        )

    played, _ = swept(tmp_path, second_fails, fail_fast=True)
    assert loaders(played.ran, "trial") == ["baseline", "conservative"]
    assert loaders(played.ran, "confirm") == []


def test_machines_that_are_lost_end_the_sweep_and_keep_its_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def lost(trial: Trial) -> Row:
        if "balanced" in trial.point.overrides[-1]:
            raise ExecutorLost("No machine is left.")
        return good(trial)

    played, kept = swept(tmp_path, lost)
    assert len(kept.found.rows) == 2
    assert loaders(played.ran, "confirm") == []
    assert "No machine is left. The same command again runs what is missing." in capsys.readouterr().out
