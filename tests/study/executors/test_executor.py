"""What is made of a trial's end, and what other machines are asked for."""

import json
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.kit.made_trials import made_settings, made_trial
from tests.run.folder.test_lock import holder
from wellfed.process import Stopped
from wellfed.record import RunRecord
from wellfed.study.executors.executor import TrialEnd
from wellfed.study.executors.launchers import OtherLauncher
from wellfed.study.executors.remote import RemoteExecutor, Sent
from wellfed.study.executors.trial_process import ProcessAnswer
from wellfed.study.row import Row
from wellfed.study.trial_end import RowMaker

LOST = ProcessAnswer("node7", None, "its worker process was killed")


class Nowhere(RemoteExecutor):
    """Loses every trial at once; ``begins`` are those that have written a record by then."""

    begins: Sequence[str] = ()

    def _connect(self) -> None:
        pass

    def _disconnect(self) -> None:
        pass

    def _submit(self, sent: Sent) -> None:
        self._running[sent.trial.key] = sent

    def _answers(self) -> list[tuple[Sent, ProcessAnswer]]:
        for key in self._running:
            if key in self.begins:
                record(self.settings.folder / key, "running", None, "2026-01-02T00:00:00+00:00")
        lost = [(sent, LOST) for sent in self._running.values()]
        self._running.clear()
        return lost


def record(folder: Path, status: str, exit_code: int | None, started_at: str) -> None:
    folder.mkdir(exist_ok=True)
    made = RunRecord.start("p")
    made.status, made.exit_code, made.started_at = status, exit_code, started_at  # type: ignore[assignment]
    made.write(folder)


def lost(folder: Path, key: str = "p", begins: Sequence[str] = ()) -> Row:
    with Nowhere(made_settings(folder)) as executor:
        executor.begins = begins
        ((_, row),) = executor.run([made_trial(key)])
    return row


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A study with the record of a trial that ran out of memory."""
    record(tmp_path / "p", "oom", 3, "2026-01-01T00:00:00+00:00")
    return tmp_path


def test_a_trial_that_is_lost_before_it_begins_leaves_the_earlier_attempt_as_it_is(earlier: Path) -> None:
    content = (earlier / "p" / "run.json").read_bytes()
    row = lost(earlier)
    assert (row.status, row.folder, row.host) == ("killed", "", "node7")
    assert row.error == {"kind": "code", "message": LOST.problem, "advice": "sweep.retry=[killed] runs it again."}
    assert (earlier / "p" / "run.json").read_bytes() == content


def test_a_trial_that_is_lost_while_it_runs_is_so_in_its_own_record(earlier: Path) -> None:
    row = lost(earlier, begins=["p"])
    assert (row.status, row.folder, row.started_at) == ("killed", "p", "2026-01-02T00:00:00+00:00")
    assert (row.error or {})["message"] == LOST.problem
    assert json.loads((earlier / "p" / "run.json").read_text())["status"] == "killed"


def test_a_trial_that_is_lost_before_there_was_a_folder_has_none(tmp_path: Path) -> None:
    row = lost(tmp_path)
    assert (row.status, row.folder) == ("killed", "")


def test_a_trial_that_was_not_started_has_no_folder_and_says_why(tmp_path: Path) -> None:
    end = TrialEnd(not_started="infeasible", message="needs 9 GiB", host="node7", predicted_peak_gib=9.0)
    row = RowMaker()(made_trial("p").row, end, tmp_path)
    assert (row.status, row.folder, row.host, row.predicted_peak_gib) == ("infeasible", "", "node7", 9.0)
    assert (row.error or {})["message"] == "needs 9 GiB"


@pytest.mark.parametrize(
    ("most_gpus", "asked", "num_gpus", "fits"),
    [
        (4, {"devices": 2}, 2, True),
        (1, {"devices": 2}, 2, False),
        (4, {"devices": 2, "accelerator": "cpu"}, 0, True),
        (4, {"gpu": "cpu"}, 0, True),
        (0, {"devices": 2}, 0, True),  # its plan says what is wrong
        (None, {"devices": 2}, 0, True),
        (None, {"devices": 2, "accelerator": "gpu"}, 2, True),
    ],
)
def test_a_trial_is_sent_with_the_gpus_that_it_asks_for(
    tmp_path: Path, most_gpus: int | None, asked: dict[str, object], num_gpus: int, fits: bool
) -> None:
    executor = Nowhere(made_settings(tmp_path))
    executor.most_gpus = most_gpus
    trial = made_trial("a", **asked)
    assert executor._num_gpus(trial.composed) == num_gpus
    ((_, row),) = executor.run([trial])
    assert row.status == ("killed" if fits else "infeasible")


def test_more_trials_are_taken_until_there_are_none(tmp_path: Path) -> None:
    left = [made_trial("b"), made_trial("c")]
    with Nowhere(made_settings(tmp_path)) as executor:
        ended = [trial.key for trial, _ in executor.run([made_trial("a")], lambda: left.pop(0) if left else None)]
    assert ended == ["a", "b", "c"]


def test_the_file_that_says_the_study_runs_goes_with_it(tmp_path: Path) -> None:
    settings = made_settings(tmp_path)
    with Nowhere(settings):
        assert [path.name.startswith("alive_") for path in settings.scratch.iterdir()] == [True]
    assert list(settings.scratch.iterdir()) == []


def test_a_trial_whose_folder_is_held_fails_alone_under_another_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wellfed.study.executors.launchers.FREE_WITHIN_S", 0.0)
    launched: list[str] = []
    (tmp_path / "a").mkdir()
    executor = OtherLauncher(made_settings(tmp_path), lambda jobs: launched.extend(words[-1] for words in jobs))
    with holder(tmp_path / "a") as other:
        rows = {trial.key: row for trial, row in executor.run([made_trial("a"), made_trial("b")])}
    assert launched == ["hydra.sweep.subdir=b"]
    assert rows["a"].status == "failed"
    assert f"another process is writing to it (process {other.pid} on " in (rows["a"].error or {})["message"]


@pytest.mark.parametrize("stop", [SystemExit(130), Stopped(signal.SIGINT)], ids=["in_a_trial", "between_trials"])
def test_a_signal_under_another_launcher_keeps_the_trials_that_have_ended(tmp_path: Path, stop: BaseException) -> None:
    def launch(jobs: list[list[str]]) -> None:
        record(tmp_path / "a", "ok", 0, "2026-01-02T00:00:00+00:00")
        record(tmp_path / "b", "interrupted", 130, "2026-01-02T00:00:01+00:00")
        raise stop

    settings = made_settings(tmp_path)
    ended = OtherLauncher(settings, launch).run(map(made_trial, "abc"))
    trial, row = next(ended)
    assert (trial.key, row.status) == ("a", "ok")
    with pytest.raises(Stopped) as caught:
        next(ended)
    assert caught.value.signum == signal.SIGINT
    assert settings.stop.signum == (signal.SIGINT if isinstance(stop, SystemExit) else None)  # else its handler sets it
