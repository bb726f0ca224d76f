"""Runs trials in fork servers, each where there is a place for it, and yields each as it ends.

A place is a GPU or several, or the whole of a machine without one, with a share of the processors.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from wellfed.config.schema import RunConfig
from wellfed.study.executors.fork_server import ForkServer, ForkServerFailed, Job, JobEnd, Work

_MOST_SERVERS = 3
"""That hold their data and model at one time."""
_TICK_S = 0.5


@dataclass(frozen=True)
class Place:
    """What one trial is given."""

    gpus: tuple[int, ...]
    """Indices into the sweep's own list; empty for a trial on the processor."""
    environment: Mapping[str, str]
    cpus: frozenset[int] | None
    """None = all."""


class Slots:
    """Which GPUs are free. Trials on the processor run alone, so that none disturbs another's figures.

    Args:
        gpus: as CUDA_VISIBLE_DEVICES names them: indices or UUIDs; empty on a machine without.
        cpus: that this process may run on; shared out evenly, so that loaders of neighbours don't take each other's.
    """

    def __init__(self, gpus: Sequence[str], cpus: frozenset[int] | None) -> None:
        self._gpus, self._cpus = tuple(gpus), cpus
        self._free = list(range(len(self._gpus)))
        self._is_alone = False
        self._busy = 0

    def take(self, num_gpus: int) -> Place | None:
        """A place for a trial on so many GPUs; 0 = on the processor. None = not now."""
        if not self.has_place(num_gpus):
            return None
        self._busy += 1
        if num_gpus == 0:
            self._is_alone = True
            return Place((), {}, None)
        taken, self._free = tuple(self._free[:num_gpus]), self._free[num_gpus:]
        named = ",".join(self._gpus[index] for index in taken)
        return Place(taken, {"CUDA_VISIBLE_DEVICES": named}, self._share(taken))

    def has_place(self, num_gpus: int) -> bool:
        """Whether `take` would give one."""
        return not self._is_alone and len(self._free) >= num_gpus and not (num_gpus == 0 and self._busy > 0)

    def give_back(self, place: Place) -> None:
        """Its trial has ended."""
        self._busy -= 1
        self._free = sorted([*self._free, *place.gpus])
        self._is_alone = False

    def _share(self, taken: Sequence[int]) -> frozenset[int] | None:
        if self._cpus is None or len(self._gpus) < 2 or len(self._cpus) < len(self._gpus):
            return None
        ordered, number = sorted(self._cpus), len(self._gpus)
        edges = [round(index * len(ordered) / number) for index in range(number + 1)]
        return frozenset(cpu for index in taken for cpu in ordered[edges[index] : edges[index + 1]])


def visible(environment: Mapping[str, str], num_gpus: int) -> list[str]:
    """How to name each of the ``num_gpus`` that CUDA shows in this environment to a child, in CUDA's order."""
    entries = [entry.strip() for entry in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]
    return entries[:num_gpus] if len(entries) >= num_gpus else [str(index) for index in range(num_gpus)]


@dataclass(frozen=True)
class QueuedTrial:
    """One process to be."""

    key: str
    """Tells trials apart."""
    shared: str
    """Trials of the same data and model have it in common."""
    config: RunConfig
    task: Any
    folder: Path
    num_gpus: int = 0
    """0 = it trains on the processor."""
    asks: bool = False
    """It speaks with the sweep: `TrialPool.said` replies."""


@dataclass(frozen=True)
class FinishedTrial:
    """What became of one."""

    trial: QueuedTrial
    end: JobEnd | ForkServerFailed
    """Failed: it was not started."""
    timed_out: bool = False


@dataclass
class _RunningTrial:
    trial: QueuedTrial
    server: ForkServer
    place: Place
    began_s: float
    timed_out: bool = False


@dataclass
class ForkServers:
    """A fork server for each data and model, made when first asked for; the oldest goes where there are too many.

    ``log`` names that of a server by its number; preparing may take ``timeout_s``.
    """

    prepare: Callable[[RunConfig], Any]
    work: Work
    log: Callable[[int], Path]
    timeout_s: float
    way_out: str = "Raise sweep.timeout_s, with sweep.retry=[timeout]."
    """Of a server that is not ready by then."""
    _servers: dict[str, ForkServer] = field(default_factory=dict, init=False)
    _numbers: dict[str, int] = field(default_factory=dict, init=False)

    def get(self, shared: str, config: RunConfig) -> ForkServer:
        """The server of what is shared, when it is ready.

        Raises:
            ForkServerFailed: it could not be prepared.
        """
        server = self.begin(shared, config)
        try:
            server.wait_ready(self.timeout_s, self.way_out)
        except BaseException:
            self.drop(server)
            raise
        return server

    def is_ready(self, server: ForkServer) -> bool:
        """Whether what it shares is there; does not wait.

        Raises:
            ForkServerFailed: it could not be prepared.
        """
        try:
            return server.is_ready(self.timeout_s, self.way_out)
        except ForkServerFailed:
            self.drop(server)
            raise

    def begin(self, shared: str, config: RunConfig, busy: Iterable[ForkServer] = ()) -> ForkServer:
        """The server of what is shared, ready or not; those that are ``busy`` stay."""
        if shared in self._servers:
            return self._servers[shared]
        for old in list(self._servers)[: max(0, len(self._servers) - _MOST_SERVERS + 1)]:
            if self._servers[old] not in busy:
                self._servers.pop(old).close()
        number = self._numbers.setdefault(shared, len(self._numbers) + 1)
        siblings = self._servers.values()
        server = ForkServer(lambda: self.prepare(config), self.work, self.log(number), siblings)
        self._servers[shared] = server
        return server

    def drop(self, server: ForkServer) -> None:
        """It has died, or is to."""
        self._servers = {shared: each for shared, each in self._servers.items() if each is not server}
        server.close()

    def close(self) -> None:
        """End all of them, and with them what they run."""
        for server in list(self._servers.values()):
            self.drop(server)


@dataclass
class TrialPool:
    """Takes trials from a queue into the places there are, and calls ``tick`` a few times a second."""

    servers: ForkServers
    slots: Slots
    timeout_s: float
    open_folder: Callable[[Path], None]
    tick: Callable[[], None] = lambda: None
    said: Callable[[QueuedTrial, Any], Any] = lambda trial, what: None
    """What is replied to a trial that asks."""
    _queue: deque[QueuedTrial] = field(default_factory=deque, init=False)
    _running: dict[str, _RunningTrial] = field(default_factory=dict, init=False)

    def run(
        self, trials: Iterable[QueuedTrial] = (), more: Callable[[], QueuedTrial | None] | None = None, needs: int = 0
    ) -> Iterator[FinishedTrial]:
        """Each trial when it has ended, until all have.

        Args:
            more: gives one trial more, when there is a place for it and no sooner: what to try next may depend on what
                has ended. None = none now; asked again when a trial has ended, or a moment later while one runs.
            needs: GPUs of each that ``more`` gives.
        """
        self._queue.extend(trials)
        while True:
            yield from self._start_queued()
            while not self._queue and more is not None and self.slots.has_place(needs):
                asked = more()
                if asked is None:
                    break
                self._queue.append(asked)
                yield from self._start_queued()
            if not (self._queue or self._running):
                return
            self.tick()
            if self._running:
                yield from self._wait()

    def _start_queued(self) -> Iterator[FinishedTrial]:
        while self._queue and (place := self.slots.take(self._queue[0].num_gpus)) is not None:
            yield from self._start(self._queue.popleft(), place)

    def start_no_more(self) -> None:
        """What runs goes on; what is queued is not started."""
        self._queue.clear()

    def _start(self, trial: QueuedTrial, place: Place) -> Iterator[FinishedTrial]:
        """Yields what ends meanwhile, the trial itself included where it can't be started."""
        job = Job(trial.key, trial.folder, trial.task, place.environment, place.cpus, trial.asks)
        try:
            server = yield from self._prepared(trial)
            self.open_folder(trial.folder)
            try:
                server.start(job)
            except ForkServerFailed:  # it has died since it was last heard of
                yield from self._all_died(server)
                server = yield from self._prepared(trial)
                server.start(job)
        except ForkServerFailed as failed:
            self.slots.give_back(place)
            yield FinishedTrial(trial, failed)
            return
        self._running[trial.key] = _RunningTrial(trial, server, place, time.monotonic())

    def _prepared(self, trial: QueuedTrial) -> Generator[FinishedTrial, None, ForkServer]:
        """Its server. Those that run are heard and held to their time while data and model are made."""
        server = self.servers.begin(trial.shared, trial.config, [each.server for each in self._running.values()])
        while not self.servers.is_ready(server):
            self.tick()
            yield from self._wait(server.connection)
        return server

    def _wait(self, *preparing: Connection) -> Iterator[FinishedTrial]:
        """A little, for what ends, or says that it is there."""
        now_s = time.monotonic()
        for each in self._running.values():
            if now_s >= each.began_s + self.timeout_s and not each.timed_out:
                each.timed_out = True
                each.server.kill(each.trial.key)
        servers = {id(each.server.connection): each.server for each in self._running.values()}
        for ready in wait([*preparing, *(server.connection for server in servers.values())], timeout=_TICK_S):
            if ready in preparing:
                continue
            server = servers[id(ready)]
            try:
                end = server.take()
            except ForkServerFailed:
                yield from self._all_died(server)
            else:
                if isinstance(end, JobEnd):
                    yield self._ended(end)
                else:
                    server.reply(end.key, self.said(self._running[end.key].trial, end.what))

    def _all_died(self, server: ForkServer) -> Iterator[FinishedTrial]:
        self.servers.drop(server)
        for key in [key for key, each in self._running.items() if each.server is server]:
            yield self._ended(JobEnd(key, -signal.SIGKILL, time.monotonic() - self._running[key].began_s))

    def _ended(self, end: JobEnd) -> FinishedTrial:
        each = self._running.pop(end.key)
        self.slots.give_back(each.place)
        # It may have ended well just then.
        return FinishedTrial(each.trial, end, each.timed_out and end.code == -signal.SIGKILL)
