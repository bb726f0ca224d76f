"""What is made of a trial's end, and trials that another launcher of Hydra runs."""

import signal
from pathlib import Path

import pytest

from tests.kit.made_trials import made_settings, made_trial
from tests.run.folder.test_lock import holder
from wellfed.process import Stopped
from wellfed.record.entries import RunRecord
from wellfed.study.executors.executor import ExecutorLost, TrialEnd
from wellfed.study.executors.launchers import LaunchingExecutor
from wellfed.study.trial_end import RowMaker


def record(folder: Path, status: str, exit_code: int | None, started_at: str) -> None:
    folder.mkdir(exist_ok=True)
    made = RunRecord.start("p")
    made.status, made.exit_code, made.started_at = status, exit_code, started_at  # type: ignore[assignment]
    made.write(folder)


def test_a_trial_that_was_not_started_has_no_folder_and_says_why(tmp_path: Path) -> None:
    end = TrialEnd(not_started="infeasible", message="needs 9 GiB", host="node7", predicted_peak_gib=9.0)
    row = RowMaker()(made_trial("p").row, end, tmp_path)
    assert (row.status, row.folder, row.host, row.predicted_peak_gib) == ("infeasible", "", "node7", 9.0)
    assert (row.error or {})["message"] == "needs 9 GiB"


def test_a_trial_whose_folder_is_held_waits_for_the_next_command(tmp_path: Path) -> None:
    launched: list[str] = []
    (tmp_path / "a").mkdir()

    def launch(folder: str, jobs: list[list[str]]) -> None:
        launched.extend(words[-1] for words in jobs)

    executor = LaunchingExecutor(made_settings(tmp_path), launch)
    with holder(tmp_path / "a") as other:
        rows = {trial.key: row for trial, row in executor.run([made_trial("a"), made_trial("b")])}
    assert launched == ["hydra.sweep.subdir=b"]
    assert rows["a"].status == "interrupted"
    assert f"another process is writing to it (process {other.pid} on " in (rows["a"].error or {})["message"]


@pytest.mark.parametrize("stop", [SystemExit(130), Stopped(signal.SIGINT)], ids=["in_a_trial", "between_trials"])
def test_a_signal_under_another_launcher_keeps_the_trials_that_have_ended(tmp_path: Path, stop: BaseException) -> None:
    def launch(folder: str, jobs: list[list[str]]) -> None:
        record(tmp_path / "a", "ok", 0, "2026-01-02T00:00:00+00:00")
        record(tmp_path / "b", "interrupted", 130, "2026-01-02T00:00:01+00:00")
        raise stop

    settings = made_settings(tmp_path)
    ended = LaunchingExecutor(settings, launch).run(map(made_trial, "abc"))
    trial, row = next(ended)
    assert (trial.key, row.status) == ("a", "ok")
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
    assert next(ended)[0].key == "a"
    with pytest.raises(ExecutorLost, match="ConnectionError: no cluster"):
        next(ended)
