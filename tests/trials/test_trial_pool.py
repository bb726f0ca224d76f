"""Trials from a queue into fork servers, with real forks of little work."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from wellfed.config.schema import RunConfig
from wellfed.errors import DataError
from wellfed.forking import MAY_FORK
from wellfed.trials.fork_server import JobEnd
from wellfed.trials.slots import Slots
from wellfed.trials.trial_pool import ForkServers, QueuedTrial, TrialPool

pytestmark = pytest.mark.skipif(not MAY_FORK, reason="forks")


class Pool:
    """Runs trials, and remembers what became of them."""

    def __init__(self, folder: Path, prepare: Callable[[RunConfig], Any], work: Callable[[Any, Any], int]) -> None:
        self.folder, self.codes, self.timed_out, self.failed, self.logs = folder, {}, [], {}, []
        self.goes_on = True
        self.servers = ForkServers(prepare, work, self._log, timeout_s=60)

    def _log(self, number: int) -> Path:
        self.logs.append(number)
        return self.folder / f"{number}.log"

    def trial(self, key: str, task: Any = None, shared: str = "a", num_gpus: int = 0) -> QueuedTrial:
        return QueuedTrial(key, shared, RunConfig(), task, self.folder / key, num_gpus)

    def run(
        self,
        trials: list[QueuedTrial],
        *,
        timeout_s: float = 60,
        gpus: int = 0,
        on_start: Callable[[str], None] = lambda key: None,
    ) -> None:
        def open_folder(folder: Path) -> None:
            folder.mkdir()
            on_start(folder.name)

        slots = Slots([str(gpu) for gpu in range(gpus)], None)
        pool = TrialPool(self.servers, slots, timeout_s, open_folder)
        for finished in pool.run(trials):
            if isinstance(finished.end, JobEnd):
                self.codes[finished.trial.key] = finished.end.code
            else:
                self.failed[finished.trial.key] = str(finished.end)
            if finished.timed_out:
                self.timed_out.append(finished.trial.key)
            if not self.goes_on:
                pool.start_no_more()


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Callable[..., Pool]]:
    """Makes such; closed at the end."""
    made: list[Pool] = []

    def make(work: Callable[[Any, Any], int], prepare: Callable[[RunConfig], Any] = lambda config: None) -> Pool:
        made.append(Pool(tmp_path, prepare, work))
        return made[-1]

    before = set(psutil.Process().children(recursive=True))
    yield make
    for each in made:
        each.servers.close()
    assert set(psutil.Process().children(recursive=True)) <= before


def test_each_trial_is_told_and_what_is_shared_is_prepared_once(pool: Callable[..., Pool]) -> None:
    runs = pool(lambda prepared, task: task, lambda config: print("preparing"))
    runs.run([runs.trial(str(code), code, shared="ab"[code % 2]) for code in range(6)])
    assert runs.codes == {str(code): code for code in range(6)}
    assert list(runs.codes) == sorted(runs.codes)
    assert sorted(runs.logs) == [1, 2]
    assert all((runs.folder / f"{number}.log").read_text() == "preparing\n" for number in (1, 2))


def test_one_that_takes_too_long_is_ended_and_the_next_runs(pool: Callable[..., Pool]) -> None:
    runs = pool(lambda prepared, task: time.sleep(task) or 0)
    runs.run([runs.trial("slow", 600), runs.trial("fast", 0)], timeout_s=1)
    assert runs.codes == {"slow": -signal.SIGKILL, "fast": 0}
    assert runs.timed_out == ["slow"]


def test_what_is_shared_and_can_not_be_prepared_fails_its_trials_alone(pool: Callable[..., Pool]) -> None:
    runs, tries = pool(lambda prepared, task: 0, lambda config: fail()), []

    def fail() -> None:
        raise DataError("x.csv is cut.")

    runs.run([runs.trial("a"), runs.trial("b", shared="b")], on_start=tries.append)
    assert runs.failed == {"a": "x.csv is cut.", "b": "x.csv is cut."}
    assert tries == []


@pytest.mark.parametrize("is_last_word", [True, False])
def test_when_told_so_it_starts_no_more(pool: Callable[..., Pool], is_last_word: bool) -> None:
    runs = pool(lambda prepared, task: 1)
    runs.goes_on = not is_last_word
    runs.run([runs.trial("a"), runs.trial("b")])
    assert list(runs.codes) == (["a"] if is_last_word else ["a", "b"])


def test_a_server_that_is_killed_costs_the_trial_that_runs_alone(pool: Callable[..., Pool]) -> None:
    runs = pool(lambda prepared, task: os.kill(os.getppid(), signal.SIGKILL) or time.sleep(600) if task else 0)
    runs.run([runs.trial("a"), runs.trial("b", "kill"), runs.trial("c")])
    assert runs.codes == {"a": 0, "b": -signal.SIGKILL, "c": 0}


def test_a_server_that_is_killed_between_two_trials_costs_none(pool: Callable[..., Pool]) -> None:
    others = set(psutil.Process().children())

    def kill_server(key: str) -> None:
        if key == "b":
            (server,) = set(psutil.Process().children()) - others
            server.kill()
            while server.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)

    runs = pool(lambda prepared, task: 0)
    runs.run([runs.trial("a"), runs.trial("b"), runs.trial("c")], on_start=kill_server)
    assert runs.failed == {}
    assert list(runs.codes) == ["a", "b", "c"]
    assert runs.codes["c"] == 0


@pytest.mark.slow
def test_no_more_than_three_hold_their_data_at_one_time(pool: Callable[..., Pool]) -> None:
    runs, most, others = pool(lambda prepared, task: 0), [], set(psutil.Process().children())
    trials = [runs.trial(name, shared=name[0]) for name in ("a", "b", "c", "d", "e", "a2")]
    runs.run(trials, on_start=lambda key: most.append(len({*psutil.Process().children()} - others)))
    assert set(runs.codes.values()) == {0}
    assert max(most) == 3


def test_each_gpu_has_a_trial_at_a_time_and_all_are_used(pool: Callable[..., Pool], tmp_path: Path) -> None:
    def work(prepared: Any, task: str) -> int:
        """Waits for its neighbour."""
        (tmp_path / f"{task}.{os.environ['CUDA_VISIBLE_DEVICES']}").touch()
        while len(list(tmp_path.glob(f"{task}.*"))) < 2:
            time.sleep(0.01)
        return int(os.environ["CUDA_VISIBLE_DEVICES"])

    runs = pool(work)
    runs.run([runs.trial(name, name[0], num_gpus=1) for name in ("a1", "a2")], gpus=2)
    assert sorted(runs.codes.values()) == [0, 1]


def test_closing_ends_what_runs(pool: Callable[..., Pool]) -> None:
    runs = pool(lambda prepared, task: time.sleep(600) or 0)

    def stop(key: str) -> None:
        if key == "b":
            raise KeyboardInterrupt

    with closing(runs.servers), pytest.raises(KeyboardInterrupt):
        runs.run([runs.trial("a", num_gpus=1), runs.trial("b", num_gpus=1)], gpus=2, on_start=stop)
