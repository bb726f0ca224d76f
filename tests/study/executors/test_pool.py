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
from hypothesis import given
from hypothesis import strategies as st

from wellfed.config.schema import RunConfig
from wellfed.errors import DataError
from wellfed.process import MAY_FORK
from wellfed.study.executors.fork_server import JobEnd
from wellfed.study.executors.pool import ForkServers, QueuedTrial, Slot, Slots, TrialPool, visible

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


@pytest.mark.slow
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


@pytest.mark.parametrize("waits_for", ["reply", pytest.param("timeout", marks=pytest.mark.slow)])
def test_those_that_run_are_heard_and_ended_while_another_s_data_is_made(tmp_path: Path, waits_for: str) -> None:
    done = tmp_path / "done"

    def prepare(config: RunConfig) -> bool:
        """The second waits for the first trial, but not for ever."""
        end_s = time.monotonic() + 5
        while config.seed == 2 and not done.exists() and time.monotonic() < end_s:
            time.sleep(0.01)
        return done.exists()

    def work(was_done: bool, task: str, ask: Callable[[Any], Any]) -> int:
        if task == "reply":
            ask("?")
            done.touch()
        elif task == "timeout":
            time.sleep(600)
        return int(was_done)

    queue = [
        QueuedTrial(key, key, RunConfig(seed=seed), task, tmp_path / key, 1, asks=True)
        for seed, key, task in ((1, "first", waits_for), (2, "second", ""))
    ]
    with closing(ForkServers(prepare, work, lambda number: tmp_path / f"{number}.log", 60)) as servers:
        limit_s = 1 if waits_for == "timeout" else 60
        trials = TrialPool(servers, Slots(["0", "1"], None), limit_s, Path.mkdir, said=lambda trial, what: None)
        ended = {}
        for finished in trials.run(queue):
            assert isinstance(finished.end, JobEnd)
            ended[finished.trial.key] = finished.end.code
            done.touch()
    assert ended == {"first": 0 if waits_for == "reply" else -signal.SIGKILL, "second": 1}


# -- slots ---

UUIDS = [f"GPU-{number}" for number in range(8)]
CPUS = st.none() | st.sets(st.integers(0, 200), min_size=1, max_size=64).map(frozenset)


@given(st.integers(0, 8), CPUS, st.lists(st.integers(-3, 4), max_size=40))
def test_no_gpu_has_two_trials_and_all_come_back(num_gpus: int, cpus: frozenset[int] | None, wishes: list[int]) -> None:
    """A wish of n >= 0 asks for n GPUs; n < 0 gives back one of those that are out."""
    slots, out = Slots(UUIDS[:num_gpus], cpus), []
    for wish in wishes:
        if wish < 0:
            if out:
                slots.give_back(out.pop(wish % len(out)))
            continue
        used = {gpu for place in out for gpu in place.gpus}
        place = slots.take(wish)
        is_alone = any(not each.gpus for each in out)
        if wish == 0:
            assert (place is None) == bool(out)
        else:
            assert (place is None) == (is_alone or num_gpus - len(used) < wish)
        if place is None:
            continue
        assert len(place.gpus) == wish
        assert not used & set(place.gpus)
        named = ",".join(UUIDS[gpu] for gpu in place.gpus)
        assert dict(place.environment) == ({"CUDA_VISIBLE_DEVICES": named} if wish else {})
        out.append(place)
        assert_shares_apart(out)
    for place in out:
        slots.give_back(place)
    if num_gpus:
        whole = slots.take(num_gpus)
        assert whole is not None
        assert whole.gpus == tuple(range(num_gpus))


def assert_shares_apart(out: list[Slot]) -> None:
    shares = [place.cpus for place in out if place.cpus is not None]
    assert sum(map(len, shares)) == len(frozenset().union(*shares))


@given(st.integers(2, 8), st.sets(st.integers(0, 200), min_size=8, max_size=64).map(frozenset))
def test_the_processors_are_shared_out_evenly_and_none_is_left(num_gpus: int, cpus: frozenset[int]) -> None:
    slots = Slots(UUIDS[:num_gpus], cpus)
    places = [slots.take(1) for _ in range(num_gpus)]
    shares = [place.cpus for place in places if place is not None and place.cpus is not None]
    assert len(shares) == num_gpus
    assert frozenset().union(*shares) == cpus
    assert sum(map(len, shares)) == len(cpus)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(
    ("gpus", "cpus"),
    [(UUIDS[:1], frozenset(range(8))), (UUIDS[:4], frozenset(range(3))), (UUIDS[:2], None)],
    ids=["one GPU", "fewer processors than GPUs", "unknown"],
)
def test_where_nothing_is_to_be_shared_all_may_be_used(gpus: list[str], cpus: frozenset[int] | None) -> None:
    place = Slots(gpus, cpus).take(1)
    assert place is not None
    assert place.cpus is None


@pytest.mark.parametrize(
    ("environment", "num_gpus", "names"),
    [
        ({}, 2, ["0", "1"]),
        ({}, 0, []),
        ({"CUDA_VISIBLE_DEVICES": "3,1"}, 2, ["3", "1"]),
        ({"CUDA_VISIBLE_DEVICES": " GPU-a , MIG-b "}, 2, ["GPU-a", "MIG-b"]),
        ({"CUDA_VISIBLE_DEVICES": "2,9,4"}, 1, ["2"]),  # CUDA stops at what it does not know
        ({"CUDA_VISIBLE_DEVICES": ""}, 0, []),
        ({"CUDA_VISIBLE_DEVICES": "7"}, 2, ["0", "1"]),  # set after CUDA was asked
    ],
)
def test_children_see_the_same_gpus_by_the_same_names(
    environment: dict[str, str], num_gpus: int, names: list[str]
) -> None:
    assert visible(environment, num_gpus) == names


@pytest.mark.parametrize(("gpus", "most"), [pytest.param(0, 1, marks=pytest.mark.slow), (1, 1), (2, 2)])
def test_the_next_is_asked_for_when_there_is_a_place_and_no_sooner(
    pool: Callable[..., Pool], gpus: int, most: int
) -> None:
    runs = pool(lambda prepared, task: time.sleep(0.05) or task)
    known: list[tuple[int, int]] = []
    """How many were asked for and had ended when each was asked for."""
    asked, ended = 0, []

    def more() -> QueuedTrial | None:
        nonlocal asked
        known.append((asked, len(ended)))
        if asked == 6:
            return None
        asked += 1
        return runs.trial(str(asked), asked, num_gpus=min(gpus, 1))

    trials = TrialPool(runs.servers, Slots([str(gpu) for gpu in range(gpus)], None), 60, Path.mkdir)
    for finished in trials.run(more=more):
        ended.append(finished.trial.key)  # noqa: PERF401  `more` looks at it meanwhile
    assert sorted(ended) == ["1", "2", "3", "4", "5", "6"]
    assert all(begun - over < most for begun, over in known if begun < 6)
    assert max(begun - over for begun, over in known if begun < 6) == most - 1


def test_a_trial_that_asks_is_replied_to(pool: Callable[..., Pool]) -> None:
    runs = pool(lambda prepared, task, ask: ask(task) + ask(task + 1))
    trials = TrialPool(runs.servers, Slots([], None), 60, Path.mkdir, said=lambda trial, what: int(trial.key) * what)
    queue = [QueuedTrial(key, "a", RunConfig(), 3, runs.folder / key, asks=True) for key in ("1", "2")]
    codes = {done.trial.key: done.end.code for done in trials.run(queue) if isinstance(done.end, JobEnd)}
    assert codes == {"1": 7, "2": 14}
