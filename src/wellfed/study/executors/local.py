"""Runs trials on this machine, one a GPU at a time, in processes forked from one that has made data and model.

The study's own process imports no torch: its servers import `trial_work`, unless points need several of them.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

from wellfed.config.compose import Composed
from wellfed.config.schema import Accelerator, RunConfig
from wellfed.errors import ConfigError
from wellfed.observe.machine_facts import MachineFacts
from wellfed.process import CPUS_AT_START, without_collections
from wellfed.run.train import set_environment
from wellfed.study.executors.executor import Ended, Executor, More, PointPlan, Prune, StudySettings
from wellfed.study.executors.fork_server import ForkServer, ForkServerFailed, Job, Said
from wellfed.study.trial_end import Trial, TrialEnd, open_trial_folder
from wellfed.units import counted

Task = Callable[[Any, Connection], int]
"""Task of a `Job`: `call` with the name of a function of `trial_work` and its arguments."""
_TICK_S = 0.5
"""Most seconds to wait for trials without a look at the others."""
_MOST_SERVERS = 3
"""Fork servers that hold their data and model at one time."""


def prepare_to_fork(config: RunConfig) -> None:
    """Sets the environment before torch is imported: settings that torch reads then, and that asking whether there is
    a GPU must not start CUDA."""
    set_environment(os.environ, config)
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # torch.cuda.is_available's documentation


def import_trial_work() -> None:
    """Imports what a trial needs, PyTorch included."""
    with without_collections():
        from wellfed.study.executors import trial_work  # noqa: F401


def call(function: str, *arguments: Any, **more: Any) -> Any:
    """Calls a function of `trial_work` in a fork server or a process of it."""
    from wellfed.study.executors import trial_work

    return getattr(trial_work, function)(*arguments, **more)


@dataclass
class _Running:
    """A trial that runs, or waits for its server."""

    trial: Trial
    server: ForkServer
    gpus: tuple[str, ...]
    """GPUs as CUDA_VISIBLE_DEVICES names them; empty: it trains on the processor."""
    began_s: float | None = None
    """Time of its start; None while data and model are made."""


class LocalExecutor(Executor):
    """An executor on this machine.

    A server makes each data and model once, when it is first needed. The first server imports PyTorch itself, while the
    study composes its points. A trial on the processor runs alone, since it would disturb the figures of others.

    Args:
        prepare: makes data and model of a configuration in a server.
        imports: imports what ``prepare`` needs.

    Attributes:
        machine: facts of this machine; None until a server has asked for them.
    """

    def __init__(
        self,
        settings: StudySettings,
        prepare: Callable[[Composed[RunConfig]], Any] | None = None,
        imports: Callable[[], None] = import_trial_work,
    ) -> None:
        super().__init__(settings)
        self.machine: MachineFacts | None = None
        self._prepare = prepare or partial(call, "prepare", is_timed=settings.group == "sweep")
        self._imports = imports
        self._servers: dict[str, ForkServer] = {}
        """Servers by the data and model that they hold."""
        self._numbers: dict[str, int] = {}
        self._plans: dict[str, PointPlan] = {}
        self._queue: deque[Trial] = deque()
        self._running: dict[str, _Running] = {}
        self._last_num_gpus = 0
        self._prune: Prune | None = None

    def __exit__(self, *error: object) -> None:
        """Ends all servers and the trials that they run."""
        for server in list(self._servers.values()):
            self._drop(server)

    # -- servers -------------------------------------------------------------------------------------------------------

    def expect(self, composed: Composed[RunConfig], *, is_one: bool) -> None:
        """Begins to make the data and model of a configuration, as `Executor.expect` says."""
        if not is_one:  # else PyTorch would be imported twice
            self._imports()
        self._server(composed)

    def ask(self, composed: Composed[RunConfig], function: str) -> list[Any]:
        """Returns the answers of a function of `trial_work` about a configuration, with its data and model.

        Raises:
            ForkServerFailed: data and model could not be made.
        """
        return self._answers(self._ready(composed), partial(call, function, composed=composed))

    def _server(self, composed: Composed[RunConfig], busy: Iterable[ForkServer] = ()) -> ForkServer:
        """Returns the server of a configuration's data and model, ready or not. Servers that are ``busy`` stay."""
        key = shared_key(composed.config)
        if key not in self._servers:
            for oldest in list(self._servers.values())[: max(0, len(self._servers) - _MOST_SERVERS + 1)]:
                if oldest not in busy:
                    self._drop(oldest)
            if self._numbers:
                self._imports()  # so that all others are forked with PyTorch
            number, group = self._numbers.setdefault(key, len(self._numbers) + 1), self.settings.group
            log = self.settings.folder / f"shared_{number}.log"
            way_out = f"Raise {group}.timeout_s, with {group}.retry=[timeout]."
            make = partial(self._prepare, composed)
            self._servers[key] = ForkServer(make, log, self.settings.prepare_s, way_out, self._imports)
        return self._servers[key]

    def _ready(self, composed: Composed[RunConfig]) -> ForkServer:
        """Returns the server of a configuration when its data and model are made, else raises a ForkServerFailed."""
        server = self._server(composed)
        try:
            server.wait_ready()
        except BaseException:
            self._drop(server)
            raise
        return server

    def _drop(self, server: ForkServer) -> None:
        self._servers = {key: each for key, each in self._servers.items() if each is not server}
        server.close()

    # -- plans ---------------------------------------------------------------------------------------------------------

    def _refused(self, trials: Sequence[Trial]) -> Mapping[str, TrialEnd]:
        """Plans the points of timed trials; returns the points that can't be run."""
        timed = [trial for trial in trials if trial.number is None]
        configs = {each.point.id: each.composed for each in timed if each.point.id not in self._plans}
        if len(configs) > 1:
            self.settings.say(f"Planning {counted(len(configs), 'point')}")
        groups: dict[str, list[str]] = {}
        for point, composed in configs.items():
            groups.setdefault(shared_key(composed.config), []).append(point)
        refused: dict[str, TrialEnd] = {}
        for points in groups.values():
            try:
                server = self._ready(configs[points[0]])
            except ForkServerFailed as failed:
                refused |= dict.fromkeys(points, TrialEnd(not_started=failed.status, message=str(failed)))
                continue
            try:
                self._plan([(point, configs[point]) for point in points], server)
            except ForkServerFailed:  # killed from outside, mostly for want of memory: the rest is tried without a plan
                self._drop(server)
        for trial in timed:
            plan = self._plans.get(trial.point.id)
            if plan is not None and plan.problem is not None:
                refused[plan.point] = TrialEnd(not_started=plan.status, message=plan.problem)
        if self.machine is None and trials and not refused:
            try:
                self._plan([], self._ready(trials[0].composed))
            except ForkServerFailed as failed:
                refused[trials[0].point.id] = TrialEnd(not_started=failed.status, message=str(failed))
        return refused

    def _plan(self, points: Sequence[tuple[str, Composed[RunConfig]]], server: ForkServer) -> None:
        """Plans points in one process, or in several: a point that ends the process is left without a plan."""
        while True:
            plans = self._answers(server, partial(call, "plan_points", points=points))
            self._plans.update({plan.point: plan for plan in plans})
            points = points[len(plans) + 1 :]
            if not points:
                return

    def _answers(self, server: ForkServer, task: Task) -> list[Any]:
        """Returns the answers to a task that begin with the machine, which is noted and left out."""
        seen, *answers = server.ask(Job("ask", self.settings.scratch, task, limit_s=self.settings.prepare_s)) or (None,)
        self.machine = self.machine or seen
        return answers

    def _task(self, trial: Trial, composed: Composed[RunConfig]) -> Task:
        """Returns the task that runs a trial, with all that is known about its point."""
        if trial.number is not None:
            return partial(call, "train_whole", composed=composed, may_be_pruned=trial.may_be_pruned)
        return partial(call, "run_timed", composed=composed, plan=self._plans.get(trial.point.id))

    # -- trials --------------------------------------------------------------------------------------------------------

    def run(
        self, trials: Iterable[Trial] = (), more: More | None = None, *, alone: bool = False, prune: Prune | None = None
    ) -> Ended:
        """Yields each trial when it has ended, as `Executor.run` does."""
        asked, self._prune = list(trials), prune
        refused = self._refused(asked)
        for trial in asked:
            if trial.point.id in refused:
                yield self._ended(trial, refused[trial.point.id])
        self._queue = deque(trial for trial in asked if trial.point.id not in refused)
        while True:
            while self._is_open and not (alone and self._running) and self._has_room():
                waiting = self._queue.popleft() if self._queue else None if more is None else more()
                if waiting is None:
                    break
                yield from self._start(waiting)
            if not self._running and not (self._queue and self._is_open):
                return
            servers = {each.server.connection: each.server for each in self._running.values()}
            wait(list(servers), _TICK_S)
            for server in servers.values():
                yield from self._serve(server)

    @property
    def gpus(self) -> list[str]:
        """GPUs as CUDA_VISIBLE_DEVICES names them."""
        return [] if self.machine is None else visible(os.environ, len(self.machine.training_gpus))

    def _num_gpus(self, composed: Composed[RunConfig]) -> int:
        """Returns how many GPUs a trial gets; 0 = it trains on the processor."""
        trainer = composed.config.trainer
        is_for_cpu = trainer.accelerator is Accelerator.cpu or composed.choices.get("gpu") == "cpu"
        return 0 if is_for_cpu else min(trainer.devices, len(self.gpus))

    def _free(self) -> list[str]:
        taken = {gpu for each in self._running.values() for gpu in each.gpus}
        return [gpu for gpu in self.gpus if gpu not in taken]

    def _has_room(self, trial: Trial | None = None) -> bool:
        """Returns whether a trial can be started now; None: the next that waits, else one like the last."""
        trial = trial or next(iter(self._queue), None)
        number = self._last_num_gpus if trial is None else self._num_gpus(trial.composed)
        is_alone = any(not each.gpus for each in self._running.values())
        return not is_alone and len(self._free()) >= number and not (number == 0 and self._running)

    def _start(self, trial: Trial) -> Ended:
        self._last_num_gpus = self._num_gpus(trial.composed)
        if not self._has_room(trial):  # one of `more` that needs more GPUs than the one before it
            self._queue.appendleft(trial)
            return
        server = self._server(trial.composed, [each.server for each in self._running.values()])
        gpus = tuple(self._free()[: self._last_num_gpus])
        self._running[trial.folder] = _Running(trial, server, gpus)
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
                trial = self._running[told.key].trial
                if isinstance(told.what, TrialEnd):
                    yield self._ended(trial, told.what)
                else:
                    number, value = told.what
                    server.send(Said(told.key, self._prune and self._prune(trial, number, value)))
        except ForkServerFailed as failed:
            yield from self._lost(server, failed, was_ready=is_ready)

    def _begin(self, server: ForkServer) -> Ended:
        """Starts the trials of a server that have waited for it; yields those whose folder another process uses."""
        for each in [each for each in self._running.values() if each.server is server and each.began_s is None]:
            trial, folder = each.trial, self.settings.folder / each.trial.folder
            try:
                open_trial_folder(folder)
            except ConfigError as error:  # the same command runs it again
                yield self._ended(trial, TrialEnd(not_started="interrupted", message=str(error.faults[0])))
                continue
            task = self._task(trial, replace(trial.composed, run_dir=folder))
            environment = {"CUDA_VISIBLE_DEVICES": ",".join(each.gpus)} if each.gpus else {}
            cpus, limit_s = share_of_cpus(CPUS_AT_START, self.gpus, each.gpus), self.settings.timeout_s
            try:
                server.send(Job(trial.folder, folder, task, environment, cpus, limit_s))
            except ForkServerFailed:
                folder.rmdir()
                raise
            each.began_s = time.monotonic()

    def _lost(self, server: ForkServer, failed: ForkServerFailed, *, was_ready: bool) -> Ended:
        """Ends the trials of a server that has failed; those that had not begun are tried again if it was ready."""
        self._drop(server)
        for each in [each for each in self._running.values() if each.server is server]:
            if each.began_s is not None:
                yield self._ended(each.trial, TrialEnd(-signal.SIGKILL, time.monotonic() - each.began_s))
            elif was_ready and self._is_open:
                del self._running[each.trial.folder]
                self._queue.appendleft(each.trial)
            else:
                yield self._ended(each.trial, TrialEnd(not_started=failed.status, message=str(failed)))

    def _ended(self, trial: Trial, end: TrialEnd) -> tuple[Trial, TrialEnd]:
        self._running.pop(trial.folder, None)
        plan = self._plans.get(trial.point.id)
        return trial, end if plan is None else replace(end, predicted_peak_gib=plan.predicted_peak_gib)


def shared_key(config: RunConfig) -> str:
    """Returns a text that is equal for configurations with the same data and model."""
    workload = config.workload
    has_optimizer = workload.optimizer is not None
    return json.dumps([workload.data, workload.model, has_optimizer, config.seed], sort_keys=True, default=str)


def share_of_cpus(cpus: frozenset[int] | None, gpus: Sequence[str], taken: Sequence[str]) -> frozenset[int] | None:
    """Returns the CPUs for a trial on the GPUs ``taken``, an even share each, so that loaders don't compete for CPUs.

    None = all: on the processor, with one GPU, or with fewer CPUs than GPUs.
    """
    if cpus is None or not taken or len(gpus) < 2 or len(cpus) < len(gpus):
        return None
    ordered, number = sorted(cpus), len(gpus)
    edges = [round(index * len(ordered) / number) for index in range(number + 1)]
    indices = [gpus.index(gpu) for gpu in taken]
    return frozenset(cpu for index in indices for cpu in ordered[edges[index] : edges[index + 1]])


def visible(environment: Mapping[str, str], num_gpus: int) -> list[str]:
    """Returns a name for each of the ``num_gpus`` that CUDA shows in this environment, in CUDA's order.

    A child process sees the same GPUs by these names in CUDA_VISIBLE_DEVICES.
    """
    entries = [entry.strip() for entry in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]
    return entries[:num_gpus] if len(entries) >= num_gpus else [str(index) for index in range(num_gpus)]
