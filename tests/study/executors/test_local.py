"""Trials on this machine, with real forks of little work."""

import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.kit import machines
from tests.kit.few import slow
from tests.kit.made_trials import made_settings, made_trial
from tests.run.folder.test_lock import holder
from wellfed.config.schema import RunConfig
from wellfed.errors import DataError
from wellfed.process import MAY_FORK
from wellfed.study.executors.local import LocalExecutor, Task, share_of_cpus, visible
from wellfed.study.trial_end import Trial, TrialEnd

pytestmark = pytest.mark.skipif(not MAY_FORK, reason="forks")
Work = Callable[[Any, Any, Callable[[Any], Any]], int]


def call(prepared: tuple[Any, Work], study: Connection, task: Any) -> int:
    """Calls the work that the server has beside its objects, which need not be pickled."""
    made, work = prepared

    def ask(what: Any) -> Any:
        study.send(what)
        return study.recv()

    return work(made, task, ask)


class Local(LocalExecutor):
    """Runs trials whose work is ``work(prepared, task, ask)``, and remembers what became of them."""

    def __init__(
        self, folder: Path, work: Work, prepare: Callable[[RunConfig], Any], timeout_s: float, gpus: int
    ) -> None:
        settings = made_settings(folder, timeout_s=timeout_s)
        super().__init__(settings, lambda composed: (prepare(composed.config), work), lambda: None)
        self.machine = machines.machine(*map(machines.card, range(gpus)))
        self.ends: dict[str, TrialEnd] = {}
        self.tasks: dict[str, Any] = {}
        self.on_start: Callable[[str], None] = lambda key: None
        self.goes_on = True

    def _refused(self, trials: Sequence[Trial]) -> Mapping[str, TrialEnd]:
        return {}

    def _task(self, trial: Trial, composed: Any) -> Task:
        self.on_start(trial.folder)
        return partial(call, task=self.tasks[trial.folder])

    def _ended(self, trial: Trial, end: TrialEnd) -> tuple[Trial, TrialEnd]:
        self.ends[trial.folder] = end
        return super()._ended(trial, end)

    def trial(self, key: str, task: Any = None, seed: int = 1, num_gpus: int = 1) -> Trial:
        """Trials of one seed share data and model."""
        self.tasks[key] = task
        trial = made_trial(key, devices=num_gpus, accelerator="auto" if num_gpus else "cpu")
        trial.composed.config.seed = seed
        return replace(trial, may_be_pruned=True)

    def go(self, *trials: Trial, **how: Any) -> list[str]:
        """Runs trials; returns the keys in the order of their ends."""
        keys = []
        for trial, _ in self.run(trials, **how):
            keys.append(trial.folder)
            if not self.goes_on:
                self.start_no_more()
        return keys

    @property
    def codes(self) -> dict[str, int]:
        """Exit codes of those that were started."""
        return {key: end.code for key, end in self.ends.items() if end.not_started is None}


Make = Callable[..., Local]


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Make]:
    """Makes executors; closed at the end, and then no process is left."""
    made: list[Local] = []

    def make(
        work: Callable[..., Any],
        prepare: Callable[[RunConfig], Any] = lambda config: None,
        timeout_s: float = math.inf,
        gpus: int = 0,
    ) -> Local:
        made.append(Local(tmp_path, work, prepare, timeout_s, gpus))
        return made[-1].__enter__()

    before = set(psutil.Process().children())
    yield make
    for each in made:
        each.__exit__(None, None, None)
    left = set(psutil.Process().children()) - before
    assert [one for one in left if one.status() != psutil.STATUS_ZOMBIE] == []  # init may reap orphans late


def test_each_trial_is_told_and_what_is_shared_is_prepared_once(local: Make) -> None:
    runs = local(lambda prepared, task, ask: task, lambda config: print("preparing"))
    keys = runs.go(*[runs.trial(str(code), code, seed=code % 2) for code in range(6)])
    assert runs.codes == {str(code): code for code in range(6)}
    assert keys == sorted(runs.codes)
    logs = sorted(runs.settings.folder.glob("shared_*.log"))
    assert [log.read_text() for log in logs] == ["preparing\n"] * 2


def test_what_is_shared_and_can_not_be_prepared_fails_its_trials_alone(local: Make) -> None:
    def fail(config: RunConfig) -> None:
        if config.seed != 3:
            raise DataError("x.csv is cut.")

    runs, opened = local(lambda prepared, task, ask: 0, fail), []
    runs.on_start = opened.append
    runs.go(runs.trial("a"), runs.trial("b", seed=2), runs.trial("c", seed=3))
    failed = {key: (end.not_started, end.message) for key, end in runs.ends.items() if end.not_started}
    assert failed == {"a": ("failed", "x.csv is cut."), "b": ("failed", "x.csv is cut.")}
    assert (runs.codes, opened) == ({"c": 0}, ["c"])


def test_a_server_that_is_killed_costs_the_trial_that_runs_alone(local: Make) -> None:
    runs = local(lambda prepared, task, ask: os.kill(os.getppid(), signal.SIGKILL) or time.sleep(600) if task else 0)
    runs.go(runs.trial("a"), runs.trial("b", "kill"), runs.trial("c"))
    assert runs.codes == {"a": 0, "b": -signal.SIGKILL, "c": 0}


def test_each_gpu_has_a_trial_at_a_time_and_all_are_used(local: Make, tmp_path: Path) -> None:
    def work(prepared: Any, task: str, ask: Any) -> int:
        """Waits for its neighbour."""
        (tmp_path / f"{task}.{os.environ['CUDA_VISIBLE_DEVICES']}").touch()
        while len(list(tmp_path.glob(f"{task}.*"))) < 2:
            time.sleep(0.01)
        return int(os.environ["CUDA_VISIBLE_DEVICES"])

    runs = local(work, gpus=2)
    runs.go(*[runs.trial(name, name[0]) for name in ("a1", "a2")])
    assert sorted(runs.codes.values()) == [0, 1]


@pytest.mark.parametrize(("gpus", "most"), [slow(0, 1), slow(1, 1), (2, 2)])
def test_the_next_is_asked_for_when_there_is_a_place_and_no_sooner(local: Make, gpus: int, most: int) -> None:
    runs = local(lambda prepared, task, ask: time.sleep(0.1) or task, gpus=gpus)
    known: list[tuple[int, int]] = []
    """How many were asked for and had ended when each was asked for."""
    asked = 0

    def more() -> Trial | None:
        nonlocal asked
        known.append((asked, len(runs.ends)))
        if asked == 6:
            return None
        asked += 1
        return runs.trial(str(asked), asked)

    assert sorted(runs.go(more=more)) == ["1", "2", "3", "4", "5", "6"]
    assert all(begun - over < most for begun, over in known if begun < 6)
    assert max(begun - over for begun, over in known if begun < 6) == most - 1


def test_a_trial_that_a_user_resumes_waits_for_the_next_command(local: Make, tmp_path: Path) -> None:
    runs = local(lambda prepared, task, ask: 0)
    (tmp_path / "a").mkdir()
    with holder(tmp_path / "a") as other:
        assert runs.go(runs.trial("a"), runs.trial("b")) == ["a", "b"]
    assert runs.codes == {"b": 0}
    assert runs.ends["a"].not_started == "interrupted"
    assert f"another process is writing to it (process {other.pid} on " in runs.ends["a"].message
    assert not list(tmp_path.glob("a.*"))


# -- GPUs and CPUs -----------------------------------------------------------------------------------------------------


def test_cpus_are_shared_evenly_among_gpus() -> None:
    cpus, gpus = frozenset(range(2, 10)), ["0", "GPU-b", "2"]
    shares = [share_of_cpus(cpus, gpus, [gpu]) for gpu in gpus]
    assert [sorted(share or ()) for share in shares] == [[2, 3, 4], [5, 6], [7, 8, 9]]
    assert share_of_cpus(cpus, gpus, ["0", "2"]) == frozenset({2, 3, 4, 7, 8, 9})
    assert (
        share_of_cpus(cpus, ["0"], ["0"]) is share_of_cpus(cpus, gpus, []) is share_of_cpus(None, gpus, ["0"]) is None
    )


def test_gpus_have_the_names_that_cuda_was_told() -> None:
    assert visible({"CUDA_VISIBLE_DEVICES": " GPU-a, 3 ,7"}, 2) == ["GPU-a", "3"]
    assert visible({}, 2) == ["0", "1"]


def test_a_trial_on_the_processor_runs_alone_beside_gpus(local: Make) -> None:
    runs = local(lambda prepared, task, ask: time.sleep(0.05) or 0, gpus=2)
    seen: list[tuple[str, int]] = []
    runs.on_start = lambda key: seen.append((key, sum(each.began_s is not None for each in runs._running.values())))
    runs.go(runs.trial("a"), runs.trial("cpu", num_gpus=0), runs.trial("b"), runs.trial("c"))
    assert dict(seen) == {"a": 0, "cpu": 0, "b": 0, "c": 1}
