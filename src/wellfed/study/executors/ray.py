"""Runs each trial as one Ray task with its GPUs; the only module that imports ray.

Ray queues the tasks, chooses machines and starts tasks on a machine that joins.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from wellfed.errors import ConfigError, first_line
from wellfed.study.executors import trial_process
from wellfed.study.executors.executor import TICK_S, ExecutorLost, StudySettings
from wellfed.study.executors.remote import RemoteExecutor, Sent
from wellfed.study.executors.trial_process import ProcessAnswer, ProcessStart, keep_to_share, run_process

_REACH_S = 10
_STORE_BYTES = 78643200
"""Size of the object store of a cluster that is started here, Ray's least: trials and rows are small."""
_ONE_A_MACHINE = "node:__internal_implicit_resource_wellfed"
"""Resource of which each machine has 1: Ray gives any name that begins so (``ray._raylet.IMPLICIT_RESOURCE_PREFIX``).
A trial that takes all of it runs alone on its machine."""
_WAY_OUT = "Start it (ray start --head), correct hydra.launcher.ray.init.address, or take hydra/launcher=wellfed."


class RayExecutor(RemoteExecutor):
    """An executor on a Ray cluster: a running one, or one of this machine alone, as ``ray.init`` finds it.

    Args:
        settings: settings of the study.
        init: arguments of ``ray.init``.
        remote: options of a task (``ray.remote``); they come before those that a trial would ask for.
    """

    def __init__(self, settings: StudySettings, init: Mapping[str, Any], remote: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self._init = {"log_to_driver": False, "logging_level": "ERROR", **init}
        self._remote = dict(remote)
        self._unfit: set[str] = set()
        """Nodes that can't run trials."""

    def _connect(self) -> None:
        import ray

        address = str(self._init.get("address") or os.environ.get("RAY_ADDRESS") or "")
        where = f"hydra.launcher.ray.init.address={address or 'null'}"
        _check_reached(address, where)
        os.environ.setdefault("RAY_worker_niceness", "0")  # else 15, and trials wait for whoever else uses the machine
        with _own_signals():
            try:
                ray.init(**self._chosen(address))
            except (RuntimeError, ConnectionError, ValueError, OSError, TypeError) as error:
                raise ConfigError.of(where, f"Ray can't be used: {first_line(error)}", _WAY_OUT) from error
        ray.cloudpickle.register_pickle_by_value(trial_process)
        self.most_gpus = int(max((node["Resources"].get("GPU", 0) for node in _nodes()), default=0))

    def _disconnect(self) -> None:
        import ray

        with _own_signals():
            for task in self._running:
                ray.cancel(task, force=True)
            ray.shutdown()

    def _chosen(self, address: str) -> dict[str, Any]:
        """Returns the arguments of ``ray.init``. Only a cluster that it starts may be given the size of its store."""
        from ray._private import services

        if address != "local" and (address or services.canonicalize_bootstrap_address(None) is not None):
            return self._init
        return {"object_store_memory": _STORE_BYTES, "include_dashboard": False, **self._init}

    def _answers(self) -> list[tuple[Sent, ProcessAnswer]]:
        import ray

        answers = []
        for task in ray.wait(list(self._running), timeout=TICK_S)[0]:
            sent = self._running.pop(task)
            try:
                node, answer = ray.get(task)
            except ray.exceptions.RayError as error:
                node, answer = "", ProcessAnswer("", None, _how_lost(error))
            if not answer.is_unfit:
                answers.append((sent, answer))
            elif self._is_open:
                if node not in self._unfit:
                    self.settings.say(f"{answer.host} is left out: {answer.problem}")
                self._unfit.add(node)
                if all(each["NodeID"] in self._unfit for each in _nodes()):
                    raise ExecutorLost("No machine of the cluster can run the trials.")
                self._submit(sent)
        return answers

    def _submit(self, sent: Sent) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        gpus, most = sent.num_gpus, self.most_gpus or 1
        nodes = _nodes()
        fit = [has for node in nodes if (has := node["Resources"]).get("CPU", 0) >= 1 and has.get("GPU", 0) >= gpus]
        shares = [each["CPU"] * (gpus / each["GPU"] if gpus else 1) for each in fit]
        options: dict[str, Any] = {
            "num_cpus": max(1, int(min(shares, default=1))),
            "num_gpus": gpus,
            "max_retries": 0,
            "max_calls": 1,
            "resources": {_ONE_A_MACHINE: gpus / most if gpus and not self._alone else 1},
        }
        there = [node["NodeID"] for node in nodes if node["NodeManagerHostname"] == sent.trial.host]
        if there and there[0] not in self._unfit:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(there[0], soft=True)
        elif self._unfit:
            options["label_selector"] = {"ray.io/node-id": f"!in({','.join(self._unfit)})"}

        has_own_cpus = "num_cpus" in self._remote

        def run_there(start: ProcessStart, order: bytes) -> tuple[str, ProcessAnswer]:
            """Runs in a worker of Ray, and is sent there by value since it is no function of a module."""
            own = ray.get_runtime_context().get_node_id()
            if not has_own_cpus:
                (there,) = [each["Resources"] for each in ray.nodes() if each["NodeID"] == own]
                keep_to_share(ray.get_gpu_ids(), int(there.get("GPU", 0)))
            return own, run_process(start, order)

        task = ray.remote(**{**options, **self._remote})(run_there)
        self._running[task.remote(self._process, sent.order)] = sent


def _nodes() -> list[dict[str, Any]]:
    """Returns the machines that are there now."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def _how_lost(error: Exception) -> str:
    """Returns how Ray says that a task was lost, in a few words."""
    text = str(error).lower()
    is_machine = "node" in text and "died" in text and "worker" not in text
    return "its machine was lost" if is_machine else "its worker process was killed, or its machine was lost"


def _check_reached(address: str, where: str) -> None:
    """Raises ConfigError unless an HTTP/2 server, as Ray is one, listens there. Ray itself would try for minutes."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if not colon or not port.isdigit():
        return
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S) as connection:
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
            is_ray = os.environ.get("RAY_USE_TLS") == "1" or connection.recv(9)[3:4] == b"\4"  # a frame of settings
    except OSError:
        is_ray = False
    if not is_ray:
        raise ConfigError.of(where, "no Ray cluster can be reached there.", _WAY_OUT)


@contextmanager
def _own_signals() -> Iterator[None]:
    """Restores the handlers of signals, which Ray replaces."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
