"""Runs trials on this machine, one a GPU at a time, in processes forked from one that has made data and model."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Generator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from multiprocessing.connection import wait
from pathlib import Path
from typing import Self

from wellfed.config.compose import Composed
from wellfed.config.schema import Accelerator, RunConfig
from wellfed.errors import ConfigError
from wellfed.process import CPUS_AT_START
from wellfed.run.folder.lock import only_one
from wellfed.run.train import set_environment
from wellfed.study.executors.executor import TICK_S, Ended, Executor, StudySettings, Trial, TrialEnd
from wellfed.study.executors.fork_server import ForkServer, ForkServerFailed, Job, JobEnd, Said
from wellfed.study.executors.point_plans import ForkServers, PointPlans, call, import_trial_work
from wellfed.study.executors.slots import Slot, Slots
from wellfed.study.row import Row


@dataclass
class _RunningTrial:
    trial: Trial
    server: ForkServer
    slot: Slot
    began_s: float | None = None
    """Time of its start; None while data and model are made."""


class LocalExecutor(Executor):
    """An executor on this machine.

    Attributes:
        plans: what is known before trials run: the machine, its GPUs, plans of points.
    """

    def __init__(self, settings: StudySettings) -> None:
        super().__init__(settings)
        self._slots = Slots((), None)
        self._last_num_gpus = 0
        self._running: dict[str, _RunningTrial] = {}

    def __enter__(self) -> Self:
        group = self.settings.group
        way_out = f"Raise {group}.timeout_s, with {group}.retry=[timeout]."
        prepare = partial(call, "prepare", is_timed=group == "sweep")
        self._servers = ForkServers(prepare, self.settings.folder, self.settings.prepare_s, way_out)
        self.plans = PointPlans(self.settings, self._servers)
        return self

    def __exit__(self, *error: object) -> None:
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
        self._servers.get(composed)

    def _has_room(self, trial: Trial | None) -> bool:
        if self._alone and self._running:
            return False
        return self._slots.has_room(self._last_num_gpus if trial is None else self._num_gpus(trial.composed))

    def _num_gpus(self, composed: Composed[RunConfig]) -> int:
        """Returns how many GPUs a trial gets; 0 = it trains on the processor."""
        trainer = composed.config.trainer
        is_for_cpu = trainer.accelerator is Accelerator.cpu or composed.choices.get("gpu") == "cpu"
        return 0 if is_for_cpu else min(trainer.devices, len(self.plans.gpus))

    def _start(self, trial: Trial) -> Ended:
        self._last_num_gpus = self._num_gpus(trial.composed)
        slot = self._slots.take(self._last_num_gpus)
        if slot is None:  # one of `more` that needs more GPUs than the one before it
            self._queue.appendleft(trial)
            return
        busy = [each.server for each in self._running.values()]
        server = self._servers.get(trial.composed, busy)
        self._running[trial.key] = _RunningTrial(trial, server, slot)
        yield from self._serve(server)

    def _wait(self) -> Ended:
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
                yield from self._begin(server)
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

    def _begin(self, server: ForkServer) -> Ended:
        """Starts the trials of a server that have waited for it; yields those whose folder another process uses."""
        for each in list(self._running.values()):
            if each.server is server and each.began_s is None:
                trial, folder = each.trial, self.settings.folder / each.trial.row.folder
                try:
                    open_trial_folder(folder)
                except ConfigError as error:  # the same command runs it again
                    yield self._ended(each, TrialEnd(not_started="interrupted", message=str(error.faults[0])))
                    continue
                task = self.plans.task(trial, replace(trial.composed, run_dir=folder))
                try:
                    limit_s = self.settings.timeout_s
                    server.start(Job(trial.key, folder, task, each.slot.environment, each.slot.cpus, limit_s))
                except ForkServerFailed:
                    folder.rmdir()
                    raise
                each.began_s = time.monotonic()

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
        end = replace(end, host=socket.gethostname(), predicted_peak_gib=self.plans.peak_gib(trial))
        return super()._row(trial, end)


def prepare_to_fork(config: RunConfig) -> None:
    """Sets the environment before torch is imported: settings that torch reads then, and that asking whether there is
    a GPU must not start CUDA."""
    set_environment(os.environ, config)
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # torch.cuda.is_available's documentation


def open_trial_folder(folder: Path) -> None:
    """Makes the folder of a trial. One of an earlier attempt is kept beside it, once no other process writes to it.

    Raises:
        ConfigError: another process writes to it, such as a run that was resumed there.
    """
    if folder.exists():
        with only_one(folder):
            asides = (folder.with_name(f"{folder.name}.attempt{number}") for number in count(1))
            folder.rename(next(aside for aside in asides if not aside.exists()))
    folder.mkdir()
