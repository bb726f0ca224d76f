"""Has orders done by the machines of a Ray cluster; the only door to ray.

A place is an actor on one machine: GPUs and a share of the processors there, or a whole machine without GPUs, and in it
a process that stays for the next order. Which order goes where is decided here, machine by machine: Ray itself would
put several trials on the processors of one. A machine that joins gets its places as soon as it is seen.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from wellfed.errors import ConfigError, first_line
from wellfed.study.clusters import keeper
from wellfed.study.clusters.cluster import ClusterLost, Ended, Order
from wellfed.study.clusters.keeper import Keeper, OrderEnd, ProcessSettings

_REACH_S = 10
_TICK_S = 0.5
_NODES_S = 2
"""How often the machines are looked at."""
_WAIT_S = 60
"""For a machine, when there is none that could go on."""
_SAY_S = 60
"""A place that does not open for so long is spoken of: others use the machine."""
_LEAST_STORE_BYTES = 78643200
"""Orders and answers are small; Ray's own share of the memory would be 30 %."""


@dataclass(frozen=True)
class _Node:
    """A machine of the cluster."""

    id: str
    host: str
    resources: Mapping[str, float]

    @property
    def gpus(self) -> int:
        return int(self.resources.get("GPU", 0))


@dataclass
class _RayPlace:
    """States: opening (its greeting is not answered) -> idle -> busy with an order -> idle; any -> gone."""

    node: _Node
    num_gpus: int
    actor: Any
    answer: Any
    """What is waited for; None = idle."""
    began_s: float
    order: Order | None = None
    was_spoken_of: bool = False


class RayCluster:
    """A cluster that runs already, or one of this machine alone, as ``ray.init`` finds it.

    Args:
        init: what ``ray.init`` is given.
        remote: what a place is given beside, or in place of, what it would ask for (``ray.remote``).
    """

    most_gpus: int | None = None

    def __init__(self, init: Mapping[str, Any], remote: Mapping[str, Any]) -> None:
        self._init = {"log_to_driver": False, "logging_level": "ERROR", **init}
        self._remote = dict(remote)
        self._places: list[_RayPlace] = []
        self._queue: deque[Order] = deque()
        self._unfit: set[str] = set()
        """Ids of nodes."""
        self._nodes: list[_Node] = []
        self._looked_s = -math.inf
        self._had_nodes_s = 0.0

    def open(self, settings: ProcessSettings, say: Callable[[str], None]) -> None:
        """As `Cluster.open`."""
        self._settings, self._say = settings, say
        address = str(self._init.get("address") or os.environ.get("RAY_ADDRESS") or "")
        way_out = (
            "Start it (ray start --head), correct hydra.launcher.ray.init.address, or take hydra/launcher=wellfed."
        )
        where = f"hydra.launcher.ray.init.address={address or 'null'}"
        _check_reached(address, where, way_out)
        os.environ.setdefault("RAY_worker_niceness", "0")  # else 15, and whoever else is there slows what is measured
        import ray

        with _own_signals():
            try:
                ray.init(**self._chosen(address))
            except (RuntimeError, ConnectionError, ValueError, OSError, TypeError) as error:
                problem = f"Ray can't be used: {first_line(error)}"
                raise ConfigError.of(where, problem, way_out) from error
        ray.cloudpickle.register_pickle_by_value(keeper)
        self._look()
        self.most_gpus = max((node.gpus for node in self._nodes), default=0)

    def _chosen(self, address: str) -> dict[str, Any]:
        """What ``ray.init`` is given: a store of our size only for a cluster that it starts itself."""
        if address != "local" and (address or _runs_here()):
            return self._init
        return {"object_store_memory": _LEAST_STORE_BYTES, "include_dashboard": False, **self._init}

    def run(self, orders: Sequence[Order], *, alone: bool) -> Iterator[Ended | None]:
        """As `Cluster.run`."""
        import ray

        self._queue.extend(orders)
        self._had_nodes_s = time.monotonic()
        while self._queue or any(place.order is not None for place in self._places):
            self._look()
            self._start_queued(alone)
            if self._queue:
                self._open_place(alone)
                self._check_hope()
            yield None
            waited = {place.answer: place for place in self._places if place.answer is not None}
            if not waited:
                time.sleep(_TICK_S)
                continue
            ready, _ = ray.wait(list(waited), timeout=_TICK_S)
            for answer in ready:
                if (ended := self._heard(waited[answer])) is not None:
                    yield ended

    def start_no_more(self) -> None:
        """As `Cluster.start_no_more`."""
        self._queue.clear()

    def close(self) -> None:
        """As `Cluster.close`."""
        import ray

        self._queue.clear()
        with _own_signals():
            for place in list(self._places):
                self._drop(place)
            ray.shutdown()

    def _start_queued(self, alone: bool) -> None:
        """Each that has a place, in order; one that waits for its own machines keeps no other from theirs."""
        waiting = []
        for order in self._queue:
            if (place := self._idle(order, alone)) is None:
                waiting.append(order)
            else:
                self._start(order, place)
        self._queue = deque(waiting)

    # -- machines -------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """At the machines that there are."""
        import ray

        if time.monotonic() - self._looked_s < _NODES_S:
            return
        self._looked_s = time.monotonic()
        alive_now = [node for node in ray.nodes() if node["Alive"]]
        self._nodes = [_Node(each["NodeID"], each["NodeManagerHostname"], each["Resources"]) for each in alive_now]
        ids = {node.id for node in self._nodes}
        for place in [place for place in self._places if place.order is None and place.node.id not in ids]:
            self._drop(place)

    def _may_do(self, order: Order) -> list[_Node]:
        """Machines that could, were nothing else running there."""
        least = min(1, self._remote.get("num_cpus", 1))  # a machine with none of them is there for other work
        needed: dict[str, float] = {"GPU": order.num_gpus, "CPU": least, **self._remote.get("resources", {})}
        if (accelerator := self._remote.get("accelerator_type")) is not None:
            needed[f"accelerator_type:{accelerator}"] = 0.001
        return [
            node
            for node in self._nodes
            if node.id not in self._unfit
            and (order.hosts is None or node.host in order.hosts)
            and all(node.resources.get(name, 0) >= amount for name, amount in needed.items())
        ]

    def _check_hope(self) -> None:
        """Whether what is queued will ever be done."""
        if any(place.answer is not None for place in self._places) or any(map(self._may_do, self._queue)):
            self._had_nodes_s = time.monotonic()
            return
        if self._unfit and all(node.id in self._unfit for node in self._nodes):
            raise ClusterLost("No machine of the cluster can do it.")
        if time.monotonic() - self._had_nodes_s > _WAIT_S:
            raise ClusterLost(f"For {_WAIT_S} s no machine of the cluster could do what is left.")

    # -- places ---------------------------------------------------------------------------------------------------

    def _idle(self, order: Order, alone: bool) -> _RayPlace | None:
        fit = {node.id for node in self._may_do(order)}
        for place in self._places:
            is_fit = place.answer is None and place.node.id in fit and place.num_gpus == order.num_gpus
            if is_fit and not (alone and self._is_busy(place.node)):
                return place
        return None

    def _is_busy(self, node: _Node) -> bool:
        return any(place.order is not None and place.node.id == node.id for place in self._places)

    def _open_place(self, alone: bool) -> None:
        """One more, for the first order that there is room for; those that are opening count."""
        now_s = time.monotonic()
        opening = [place for place in self._places if place.answer is not None and place.order is None]
        for place in opening:
            if now_s - place.began_s > _SAY_S and not place.was_spoken_of:
                place.was_spoken_of = True
                self._say(f"Waiting for room on {place.node.host}: others use it.")
        coming = Counter(place.num_gpus for place in opening)
        asked = Counter(order.num_gpus for order in self._queue)
        for order in self._queue:
            if coming[order.num_gpus] < asked[order.num_gpus] and self._has_opened(order, opening, alone):
                return

    def _has_opened(self, order: Order, opening: Sequence[_RayPlace], alone: bool) -> bool:
        """A place for this order, on the first machine with room for it."""
        for node in self._may_do(order):
            there = [place for place in self._places if place.node.id == node.id]
            if alone and any(place.order is not None or place in opening for place in there):
                continue
            for place in there:  # of another size
                if place.answer is None and place.num_gpus != order.num_gpus:
                    self._drop(place)
            held = [place.num_gpus for place in self._places if place.node.id == node.id]
            has_room = not held if order.num_gpus == 0 else 0 not in held and sum(held) + order.num_gpus <= node.gpus
            if has_room:
                self._places.append(self._opened(node, order.num_gpus))
                return True
        return False

    def _opened(self, node: _Node, num_gpus: int) -> _RayPlace:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        share = num_gpus / node.gpus if num_gpus else 1.0
        options = {
            "num_cpus": int(node.resources.get("CPU", 0) * share),
            "num_gpus": num_gpus,
            "max_restarts": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node.id, soft=False),
            **self._remote,
        }
        actor = ray.remote(**options)(Keeper).remote(self._settings)
        return _RayPlace(node, num_gpus, actor, actor.greet.remote(), time.monotonic())

    def _start(self, order: Order, place: _RayPlace) -> None:
        place.order, place.began_s = order, time.monotonic()
        place.answer = place.actor.do.remote(order.content)

    def _heard(self, place: _RayPlace) -> Ended | None:
        """The end of an order; None where a place has opened, or could not."""
        import ray

        order, seconds = place.order, time.monotonic() - place.began_s
        try:
            told: OrderEnd = ray.get(place.answer)
        except ray.exceptions.RayError as error:
            self._drop(place)
            if order is None:
                self._take_for_unfit(place, f"no process could be started there: {first_line(error)}")
                return None
            return Ended(order.key, OrderEnd(place.node.host, None, _how_lost(error)), seconds)
        place.answer = place.order = None
        if order is None:
            if told.is_unfit:
                self._drop(place)
                self._take_for_unfit(place, told.problem)
            return None
        if told.answer is None:
            self._drop(place)
        return Ended(order.key, told, seconds)

    def _take_for_unfit(self, place: _RayPlace, problem: str) -> None:
        self._look()
        if place.node.id in {node.id for node in self._nodes}:  # else it has just gone
            self._unfit.add(place.node.id)
            self._say(f"{place.node.host} is left out: {problem}")

    def _drop(self, place: _RayPlace) -> None:
        import ray

        self._places.remove(place)
        ray.kill(place.actor)


def _how_lost(error: Exception) -> str:
    """Ray's account in a line."""
    text = str(error)
    if "node" in text.lower() and "died" in text.lower() and "worker" not in text.lower():
        return "its machine was lost"
    return "its worker process was killed, or its machine was lost"


def _check_reached(address: str, where: str, way_out: str) -> None:
    """Raises ConfigError: nobody listens there, or nobody who speaks gRPC. Ray itself would try for minutes."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if not colon or not port.isdigit():
        return
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S) as connection:
            is_grpc = os.environ.get("RAY_USE_TLS") == "1" or _answers_http2(connection)
    except OSError as error:
        problem = f"no Ray cluster can be reached there: {error.strerror or error}."
        raise ConfigError.of(where, problem, way_out) from error
    if not is_grpc:
        raise ConfigError.of(where, "something else than Ray listens there.", way_out)


def _answers_http2(connection: socket.socket) -> bool:
    """Whether the other side answers as a gRPC server does, with its settings (RFC 9113, section 3.4)."""
    connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
    try:
        answer = connection.recv(9)
    except TimeoutError:
        return False
    return answer[3:4] == b"\4"


def _runs_here() -> bool:
    """Whether ``ray.init`` without an address would find a cluster on this machine."""
    from ray._private import services

    return services.canonicalize_bootstrap_address(None) is not None


@contextmanager
def _own_signals() -> Iterator[None]:
    """Ray puts a handler of its own in place of a program's."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
