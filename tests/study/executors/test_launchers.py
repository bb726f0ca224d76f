"""Trials that another launcher of Hydra runs."""

import signal
from pathlib import Path

import pytest

from tests.kit.made_trials import made_settings, made_trial
from tests.run.folder.test_lock import holder
from wellfed.process import Stopped
from wellfed.record.entries import RunRecord
from wellfed.study.executors.executor import ExecutorLost
from wellfed.study.executors.launchers import LaunchingExecutor
from wellfed.study.objective import SAMPLES_PER_S
from wellfed.study.rows import Kept


def record(folder: Path, status: str, exit_code: int | None, started_at: str) -> None:
    folder.mkdir(exist_ok=True)
    made = RunRecord.start("p")
    made.status, made.exit_code, made.started_at = status, exit_code, started_at  # type: ignore[assignment]
    made.write(folder)


def test_a_trial_whose_folder_is_held_waits_for_the_next_command(tmp_path: Path) -> None:
    launched: list[str] = []
    (tmp_path / "a").mkdir()

    def launch(folder: str, jobs: list[list[str]]) -> None:
        launched.extend(words[-1] for words in jobs)

    executor = LaunchingExecutor(made_settings(tmp_path), launch)
    with holder(tmp_path / "a") as other:
        ends = {trial.folder: end for trial, end in executor.run([made_trial("a"), made_trial("b")])}
    assert launched == ["hydra.sweep.subdir=b"]
    assert ends["a"].not_started == "interrupted"
    assert f"another process is writing to it (process {other.pid} on " in ends["a"].message


@pytest.mark.parametrize("stop", [SystemExit(130), Stopped(signal.SIGINT)], ids=["in_a_trial", "between_trials"])
def test_a_signal_under_another_launcher_keeps_the_trials_that_have_ended(tmp_path: Path, stop: BaseException) -> None:
    def launch(folder: str, jobs: list[list[str]]) -> None:
        record(tmp_path / "a", "ok", 0, "2026-01-02T00:00:00+00:00")
        record(tmp_path / "b", "interrupted", 130, "2026-01-02T00:00:01+00:00")
        raise stop

    settings = made_settings(tmp_path)
    ended = LaunchingExecutor(settings, launch).run(map(made_trial, "abc"))
    trial, end = next(ended)
    assert (trial.folder, end.code) == ("a", 0)
    with pytest.raises(Stopped) as caught:
        next(ended)
    assert caught.value.signum == signal.SIGINT
    assert settings.stop.signum == (signal.SIGINT if isinstance(stop, SystemExit) else None)  # else its handler sets it


def test_a_launcher_that_fails_keeps_the_trials_that_have_ended(tmp_path: Path) -> None:
    def launch(folder: str, jobs: list[list[str]]) -> None:
        assert folder == str(tmp_path)
        record(tmp_path / "a", "ok", 0, "2026-01-02T00:00:00+00:00")
        raise ConnectionError("no cluster\nat 10.0.0.5")

    ended = LaunchingExecutor(made_settings(tmp_path), launch).run(map(made_trial, "ab"))
    assert next(ended)[0].folder == "a"
    with pytest.raises(ExecutorLost, match="ConnectionError: no cluster"):
        next(ended)


def test_a_trial_that_was_stopped_while_its_launcher_ended_well_runs_again(tmp_path: Path) -> None:
    def launch(folder: str, jobs: list[list[str]]) -> None:
        record(tmp_path / "a", "ok", 0, "2026-01-02T00:00:00+00:00")
        record(tmp_path / "b", "interrupted", 143, "2026-01-02T00:00:01+00:00")
        record(tmp_path / "c", "running", None, "2026-01-02T00:00:02+00:00")

    kept = Kept(tmp_path, SAMPLES_PER_S, "abc")
    for trial, end in LaunchingExecutor(made_settings(tmp_path), launch).run(map(made_trial, "abc")):
        kept.end(trial, end)
    assert [row.status for row in kept.found.rows] == ["ok", "interrupted", "killed"]
    assert kept.missing("abc") == ["b"]
