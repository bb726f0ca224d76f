"""Runs queued trials in fork servers as GPUs become free, and yields each as it ends."""

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
"""Fork servers that hold their data and model at one time."""
_TICK_S = 0.5


@dataclass(frozen=True)
class Slot:
    """GPUs and CPUs of one trial."""

    gpus: tuple[int, ...]
    """Indices into the list of GPUs; empty for a trial on the processor."""
    environment: Mapping[str, str]
    cpus: frozenset[int] | None
    """CPUs that the trial may run on; None = all."""


class Slots:
    """GPUs of this machine and which of them are free.

    A trial on the processor runs alone, since it would disturb the figures of others.

    Args:
        gpus: GPUs as CUDA_VISIBLE_DEVICES names them, by index or UUID; empty on a machine without.
        cpus: CPUs that this process may run on. Each GPU has an even share, so that loaders don't compete for CPUs.
    """

    def __init__(self, gpus: Sequence[str], cpus: frozenset[int] | None) -> None:
        self._gpus, self._cpus = tuple(gpus), cpus
        self._free = list(range(len(self._gpus)))
        self._is_alone = False
        self._busy = 0

    def take(self, num_gpus: int) -> Slot | None:
        """Returns a slot for a trial on ``num_gpus`` GPUs (0 = on the processor), or None if there is none now."""
        if not self.has_room(num_gpus):
            return None
        self._busy += 1
        if num_gpus == 0:
            self._is_alone = True
            return Slot((), {}, None)
        taken, self._free = tuple(self._free[:num_gpus]), self._free[num_gpus:]
        named = ",".join(self._gpus[index] for index in taken)
        return Slot(taken, {"CUDA_VISIBLE_DEVICES": named}, self._share(taken))

    def has_room(self, num_gpus: int) -> bool:
        """Returns whether `take` would return a slot."""
        return not self._is_alone and len(self._free) >= num_gpus and not (num_gpus == 0 and self._busy > 0)

    def give_back(self, slot: Slot) -> None:
        """Frees a slot."""
        self._busy -= 1
        self._free = sorted([*self._free, *slot.gpus])
        self._is_alone = False

    def _share(self, taken: Sequence[int]) -> frozenset[int] | None:
        if self._cpus is None or len(self._gpus) < 2 or len(self._cpus) < len(self._gpus):
            return None
        ordered, number = sorted(self._cpus), len(self._gpus)
        edges = [round(index * len(ordered) / number) for index in range(number + 1)]
        return frozenset(cpu for index in taken for cpu in ordered[edges[index] : edges[index + 1]])


def visible(environment: Mapping[str, str], num_gpus: int) -> list[str]:
    """Returns a name for each of the ``num_gpus`` that CUDA shows in this environment, in CUDA's order.

    A child process sees the same GPUs by these names in CUDA_VISIBLE_DEVICES.
    """
    entries = [entry.strip() for entry in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]
    return entries[:num_gpus] if len(entries) >= num_gpus else [str(index) for index in range(num_gpus)]


@dataclass(frozen=True)
class QueuedTrial:
    """A trial that waits for its process."""

    key: str
    """Name that no other trial of the pool has."""
    shared: str
    """Key of its data and model: trials with the same one share a fork server."""
    config: RunConfig
    task: Any
    folder: Path
    num_gpus: int = 0
    """0 = it trains on the processor."""
    asks: bool = False
    """It sends messages and waits for the replies of `TrialPool.said`."""


@dataclass(frozen=True)
class FinishedTrial:
    """A trial and how it ended."""

    trial: QueuedTrial
    end: JobEnd | ForkServerFailed
    """`ForkServerFailed`: it was not started."""
    timed_out: bool = False


@dataclass
class _RunningTrial:
    trial: QueuedTrial
    server: ForkServer
    slot: Slot
    began_s: float
    timed_out: bool = False


@dataclass
class ForkServers:
    """One fork server for each data and model, started when first needed. The oldest ends if there are too many."""

    prepare: Callable[[RunConfig], Any]
    work: Work
    log: Callable[[int], Path]
    """Returns the log file of the n-th server."""
    timeout_s: float
    """Time limit of preparing data and model."""
    way_out: str = "Raise sweep.timeout_s, with sweep.retry=[timeout]."
    """Advice for a server that is not ready in time."""
    _servers: dict[str, ForkServer] = field(default_factory=dict, init=False)
    _numbers: dict[str, int] = field(default_factory=dict, init=False)

    def get(self, shared: str, config: RunConfig) -> ForkServer:
        """Returns the server of this data and model when it is ready.

        Raises:
            ForkServerFailed: data and model could not be made.
        """
        server = self.begin(shared, config)
        try:
            server.wait_ready(self.timeout_s, self.way_out)
        except BaseException:
            self.drop(server)
            raise
        return server

    def is_ready(self, server: ForkServer) -> bool:
        """Returns whether data and model of a server are made; does not wait.

        Raises:
            ForkServerFailed: they could not be made.
        """
        try:
            return server.is_ready(self.timeout_s, self.way_out)
        except ForkServerFailed:
            self.drop(server)
            raise

    def begin(self, shared: str, config: RunConfig, busy: Iterable[ForkServer] = ()) -> ForkServer:
        """Returns the server of this data and model, ready or not. Servers that are ``busy`` are not ended."""
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
        """Ends a server."""
        self._servers = {shared: each for shared, each in self._servers.items() if each is not server}
        server.close()

    def close(self) -> None:
        """Ends all servers and the trials that they run."""
        for server in list(self._servers.values()):
            self.drop(server)


@dataclass
class TrialPool:
    """Queue of trials and those that run."""

    servers: ForkServers
    slots: Slots
    timeout_s: float
    open_folder: Callable[[Path], None]
    tick: Callable[[], None] = lambda: None
    """Called a few times a second."""
    said: Callable[[QueuedTrial, Any], Any] = lambda trial, what: None
    """Returns the reply to a message of a trial."""
    _queue: deque[QueuedTrial] = field(default_factory=deque, init=False)
    _running: dict[str, _RunningTrial] = field(default_factory=dict, init=False)
    _last_num_gpus: int = field(default=0, init=False)

    def run(
        self, trials: Iterable[QueuedTrial] = (), more: Callable[[], QueuedTrial | None] | None = None
    ) -> Iterator[FinishedTrial]:
        """Yields each trial when it has ended, until all have.

        Args:
            trials: trials to run, in order.
            more: returns one more trial. It is called when there is room for one like the last and no sooner, since
                what to try next may depend on what has ended. None = none now: it is called again later.
        """
        self._queue.extend(trials)
        while True:
            yield from self._start_queued()
            while not self._queue and more is not None and self.slots.has_room(self._last_num_gpus):
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
        while self._queue and (slot := self.slots.take(self._queue[0].num_gpus)) is not None:
            self._last_num_gpus = self._queue[0].num_gpus
            yield from self._start(self._queue.popleft(), slot)

    def start_no_more(self) -> None:
        """Empties the queue. Trials that run go on."""
        self._queue.clear()

    def _start(self, trial: QueuedTrial, slot: Slot) -> Iterator[FinishedTrial]:
        """Starts a trial and yields those that end meanwhile. The trial is one of them if it can't be started."""
        job = Job(trial.key, trial.folder, trial.task, slot.environment, slot.cpus, trial.asks)
        try:
            server = yield from self._prepared(trial)
            self.open_folder(trial.folder)
            try:
                server.start(job)
            except ForkServerFailed:  # it has died since its last message
                yield from self._all_died(server)
                server = yield from self._prepared(trial)
                server.start(job)
        except ForkServerFailed as failed:
            self.slots.give_back(slot)
            yield FinishedTrial(trial, failed)
            return
        self._running[trial.key] = _RunningTrial(trial, server, slot, time.monotonic())

    def _prepared(self, trial: QueuedTrial) -> Generator[FinishedTrial, None, ForkServer]:
        """Returns the trial's server. Messages and time limits of running trials are handled while it is prepared."""
        server = self.servers.begin(trial.shared, trial.config, [each.server for each in self._running.values()])
        while not self.servers.is_ready(server):
            self.tick()
            yield from self._wait(server.connection)
        return server

    def _wait(self, *preparing: Connection) -> Iterator[FinishedTrial]:
        """Waits up to a tick for messages, and ends trials at their time limit."""
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
        self.slots.give_back(each.slot)
        # It may have ended well just then.
        return FinishedTrial(each.trial, end, each.timed_out and end.code == -signal.SIGKILL)
