"""Runs trials on this machine, one a GPU at a time, in processes forked from one that has made data and model."""

from __future__ import annotations

import math
import os
import signal
import socket
import time
from collections.abc import Callable, Generator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from multiprocessing.connection import wait
from pathlib import Path

from wellfed.config.compose import Composed
from wellfed.config.schema import RunConfig
from wellfed.errors import ConfigError
from wellfed.process import CPUS_AT_START
from wellfed.run.folder.lock import held_by, only_one, refusal
from wellfed.run.train import set_environment
from wellfed.study.executors.executor import TICK_S, Ended, Executor, StudySettings, Trial, TrialEnd
from wellfed.study.executors.fork_server import ForkServer, ForkServerFailed, Job, JobEnd, Said
from wellfed.study.executors.point_plans import ForkServers, PointPlans, call, import_trial_work
from wellfed.study.executors.slots import Slot, Slots
from wellfed.study.executors.tasks import is_for_cpu, processor_of
from wellfed.study.row import Row

FREE_WITHIN_S = 95
"""Seconds within which the lock of a dead process ends. An NFS server keeps locks of a machine without power for 90 s
by default (``nfsd`` of Linux)."""
_MAY_RENAME_OPEN = os.name != "nt"
"""Whether a folder can be renamed while a file in it is open."""


@dataclass
class _RunningTrial:
    trial: Trial
    server: ForkServer
    slot: Slot
    began_s: float | None = None
    """Time of its start; None while data and model are made."""


class LocalExecutor(Executor):
    """An executor on this machine.

    Args:
        settings: settings of the study.
        open_folder: makes the folder of a trial.
        log: returns the file that gets what the n-th fork server prints.

    Attributes:
        plans: what is known before trials run: the machine, its GPUs, plans of points.
    """

    def __init__(
        self,
        settings: StudySettings,
        open_folder: Callable[[Path], None] | None = None,
        log: Callable[[int], Path] | None = None,
    ) -> None:
        super().__init__(settings)
        self._open_folder = open_folder or open_trial_folder
        self._log = log or (lambda number: settings.folder / f"shared_{number}.log")
        self._slots = Slots((), None)
        self._last_num_gpus = 0
        self._running: dict[str, _RunningTrial] = {}
        self._held: dict[str, tuple[Trial, str]] = {}
        """Trials that can't start, since another process writes to their folder, with the message; by key."""
        self._held_since: dict[str, float] = {}
        """Times at which that was first seen; -inf for a trial that is tried for the last time."""

    def _reach(self) -> None:
        group = self.settings.group
        way_out = f"Raise {group}.timeout_s, with {group}.retry=[timeout]."
        prepare = partial(call, "prepare", is_timed=group == "sweep")
        self._servers = ForkServers(prepare, self._log, self.settings.prepare_s, way_out)
        self.plans = PointPlans(self.settings, self._servers)

    def _leave(self) -> None:
        self._servers.close()

    def _planned(self, trials: list[Trial]) -> Generator[tuple[Trial, Row], None, list[Trial]]:
        refused = self.plans.refused(trials)
        for trial in trials:
            if (end := refused.get(trial.row.point)) is not None:
                yield trial, self._row(trial, end)
        self._slots = Slots(self.plans.gpus, CPUS_AT_START)
        return [trial for trial in trials if trial.row.point not in refused]

    def expect(self, composed: Composed[RunConfig], *, is_one: bool) -> None:
        """Begins to make the data and model of a configuration, as `Executor.expect` says."""
        if not is_one:  # else PyTorch would be imported twice
            import_trial_work()
        self._servers.get(composed.config)

    def start_no_more(self) -> None:
        """Drops the trials that wait, as `Executor.start_no_more` says, also for their folder."""
        super().start_no_more()
        self._held.clear()

    def _has_begun(self) -> bool:
        return bool(self._running or self._held)

    def _has_room(self, trial: Trial | None) -> bool:
        if self._alone and self._running:
            return False
        return self._slots.has_room(self._last_num_gpus if trial is None else self._num_gpus(trial.composed))

    def _num_gpus(self, composed: Composed[RunConfig]) -> int:
        """Returns how many GPUs a trial gets; 0 = it trains on the processor."""
        return 0 if is_for_cpu(composed) else min(composed.config.trainer.devices, len(self.plans.gpus))

    def _start(self, trial: Trial) -> Ended:
        self._last_num_gpus = self._num_gpus(trial.composed)
        cards = () if self.plans.machine is None else self.plans.machine.training_gpus
        alike = [number for number, card in enumerate(cards) if card.name == trial.device]
        slot = self._slots.take(self._last_num_gpus, alike)
        if slot is None:  # one of `more` that needs more GPUs than the one before it
            self._queue.appendleft(trial)
            return
        busy = [each.server for each in self._running.values()]
        server = self._servers.get(trial.composed.config, busy)
        self._running[trial.key] = _RunningTrial(trial, server, slot)
        yield from self._serve(server)

    def _wait(self) -> Ended:
        yield from self._retry()
        servers = {each.server.connection: each.server for each in self._running.values()}
        wait(list(servers), TICK_S)
        for server in servers.values():
            yield from self._serve(server)

    def _serve(self, server: ForkServer) -> Ended:
        """Starts the trials of a server that is ready, and handles what it has sent."""
        is_ready = False
        try:
            is_ready = server.is_ready()
            if is_ready:
                self._begin(server)
            while is_ready and server.connection.poll():
                told = server.take()
                each = self._running[told.key]
                if isinstance(told, JobEnd):
                    yield self._ended(each, TrialEnd(told.code, told.seconds, told.is_timeout))
                else:
                    number, value = told.what
                    server.reply(Said(told.key, self._prune and self._prune(each.trial, number, value)))
        except ForkServerFailed as failed:
            yield from self._lost(server, failed, was_ready=is_ready)

    def _begin(self, server: ForkServer) -> None:
        """Starts the trials of a server that have waited for it."""
        for each in list(self._running.values()):
            if each.server is server and each.began_s is None:
                trial, folder = each.trial, self.settings.folder / each.trial.row.folder
                try:
                    self._open_folder(folder)
                except ConfigError as error:
                    self._put_aside(each, str(error.faults[0]))
                    continue
                task = self.plans.task(trial, replace(trial.composed, run_dir=folder))
                try:
                    limit_s = self.settings.timeout_s
                    server.start(Job(trial.key, folder, task, each.slot.environment, each.slot.cpus, limit_s))
                except ForkServerFailed:
                    folder.rmdir()
                    raise
                each.began_s = time.monotonic()

    def _put_aside(self, each: _RunningTrial, problem: str) -> None:
        """Lets the other trials go first, since another process writes to the folder of this one."""
        key = each.trial.key
        del self._running[key]
        self._slots.give_back(each.slot)
        if self._is_open:
            self._held[key] = each.trial, problem
            self._held_since.setdefault(key, time.monotonic())

    def _retry(self) -> Ended:
        """Once no other trial is left, queues held trials whose folder is free, and ends those held for too long.

        After that time a trial whose folder is free is tried once more, since the others may have taken longer.
        """
        if self._queue or self._running:
            return
        late = []
        for key, since_s in [(key, self._held_since[key]) for key in self._held]:
            is_late = time.monotonic() > since_s + FREE_WITHIN_S
            if since_s > -math.inf and held_by(self.settings.folder / key) is None:
                self._held_since[key] = -math.inf if is_late else since_s
                self._queue.append(self._held.pop(key)[0])
            elif is_late:
                late.append(self._held.pop(key))
        for trial, problem in late:
            yield trial, self._row(trial, TrialEnd(not_started="failed", message=problem))

    def _lost(self, server: ForkServer, failed: ForkServerFailed, *, was_ready: bool) -> Ended:
        """Ends the trials of a server that has failed; those that had not begun are tried again if it was ready."""
        self._servers.drop(server)
        for each in [each for each in self._running.values() if each.server is server]:
            if each.began_s is not None:
                yield self._ended(each, TrialEnd(-signal.SIGKILL, time.monotonic() - each.began_s))
            elif was_ready and self._is_open:
                del self._running[each.trial.key]
                self._slots.give_back(each.slot)
                self._queue.appendleft(each.trial)
            else:
                yield self._ended(each, TrialEnd(not_started=failed.status, message=str(failed)))

    def _ended(self, each: _RunningTrial, end: TrialEnd) -> tuple[Trial, Row]:
        del self._running[each.trial.key]
        self._slots.give_back(each.slot)
        return each.trial, self._row(each.trial, end)

    def _row(self, trial: Trial, end: TrialEnd) -> Row:
        processor = "" if self.plans.machine is None else processor_of(self.plans.machine)
        peak_gib = self.plans.peak_gib(trial)
        end = replace(end, host=socket.gethostname(), machine=processor, predicted_peak_gib=peak_gib)
        return super()._row(trial, end)


def prepare_to_fork(config: RunConfig) -> None:
    """Sets the environment before torch is imported: settings that torch reads then, and that asking whether there is
    a GPU must not start CUDA."""
    set_environment(os.environ, config)
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # torch.cuda.is_available's documentation


def open_trial_folder(folder: Path, check: Callable[[], None] = lambda: None) -> None:
    """Makes the folder of a trial. One of an earlier attempt is kept beside it, once no other process writes to it.

    Args:
        check: called before anything is changed; may raise.

    Raises:
        ConfigError: another process writes to it, such as a run that was resumed there.
    """
    if folder.exists():
        holder = held_by(folder)
        if holder is not None:
            raise refusal(folder, holder)
        with only_one(folder) if _MAY_RENAME_OPEN else nullcontext():
            check()
            asides = (folder.with_name(f"{folder.name}.attempt{number}") for number in count(1))
            folder.rename(next(aside for aside in asides if not aside.exists()))
    check()
    folder.mkdir()
