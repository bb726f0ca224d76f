"""Stands in for ray where it is tested which order goes where: machines of any size, and a time of its own.

Each `wait` is a tick. A process answers its greeting after one, and an order after as many as its content says; content
``lost`` ends it instead. What a machine has is counted: an actor that asks for more than is free there waits, as in
Ray.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from wellfed.study.clusters.keeper import OrderEnd


class RayError(Exception):
    """An actor has died."""


@dataclass(eq=False)
class Asked:
    """What an actor was asked."""

    actor: Actor
    content: bytes | None
    """None = the greeting."""
    left: int
    """Ticks, once the actor has its place."""


@dataclass
class NodeAffinitySchedulingStrategy:
    node_id: str
    soft: bool


class Method:
    """Calls of an actor."""

    def __init__(self, actor: Actor, is_greeting: bool) -> None:
        self._actor, self._is_greeting = actor, is_greeting

    def remote(self, content: bytes = b"") -> Asked:
        ticks = 1 if self._is_greeting or content == b"lost" else int(content)
        return Asked(self._actor, None if self._is_greeting else content, ticks)


class Actor:
    """A process on a machine."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options
        self.node: str = options["scheduling_strategy"].node_id
        self.greet, self.do = Method(self, True), Method(self, False)
        self.is_placed = False


@dataclass
class FakeRay:
    """A cluster of machines: name -> resources."""

    machines: dict[str, dict[str, float]]
    actors: list[Actor] = field(default_factory=list)
    """That live."""
    made: list[Actor] = field(default_factory=list)
    """All that there ever were."""
    ran: list[tuple[str, tuple[bytes, ...]]] = field(default_factory=list)
    """At each tick, on each machine: what ran there."""
    begun_with: dict[str, Any] = field(default_factory=dict)
    """What ``ray.init`` was given."""

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": name, "NodeManagerHostname": name, "Alive": True, "Resources": {**resources}}
            for name, resources in self.machines.items()
        ]

    def remote(self, **options: Any) -> Any:
        def make(settings: Any) -> Actor:
            actor = Actor(options)
            self.actors.append(actor)
            self.made.append(actor)
            return actor

        return lambda kind: SimpleNamespace(remote=make)

    def wait(self, answers: Sequence[Asked], timeout: float) -> tuple[list[Asked], list[Asked]]:
        for actor in self.actors:
            actor.is_placed = actor.is_placed or self._has_room(actor)
        for name in self.machines:
            here = [each.content for each in answers if each.actor.node == name and each.content is not None]
            self.ran.append((name, tuple(here)))
        for each in answers:
            each.left -= each.actor.is_placed
        return [each for each in answers if each.left <= 0], [each for each in answers if each.left > 0]

    def _has_room(self, actor: Actor) -> bool:
        """Whether what it asks for is free."""
        there = [each for each in self.actors if each.is_placed and each.node == actor.node]
        resources = self.machines[actor.node]
        return all(
            sum(each.options[asked] for each in (*there, actor)) <= resources.get(name, 0)
            for asked, name in (("num_gpus", "GPU"), ("num_cpus", "CPU"))
        )

    def get(self, answer: Asked) -> OrderEnd:
        if answer.content == b"lost":
            self.actors.remove(answer.actor)
            raise RayError("The actor died unexpectedly")
        return OrderEnd(answer.actor.node, answer.content or b"")

    def kill(self, actor: Actor) -> None:
        with contextlib.suppress(ValueError):  # dead already
            self.actors.remove(actor)

    def installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Imported as ray."""
        ray, strategies = ModuleType("ray"), ModuleType("ray.util.scheduling_strategies")
        for name in ("nodes", "remote", "wait", "get", "kill"):
            setattr(ray, name, getattr(self, name))
        ray.init = self.begun_with.update  # type: ignore[attr-defined]
        ray.shutdown = lambda: None  # type: ignore[attr-defined]
        ray.exceptions = SimpleNamespace(RayError=RayError)  # type: ignore[attr-defined]
        ray.cloudpickle = SimpleNamespace(register_pickle_by_value=lambda module: None)  # type: ignore[attr-defined]
        strategies.NodeAffinitySchedulingStrategy = NodeAffinitySchedulingStrategy  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "ray", ray)
        monkeypatch.setitem(sys.modules, "ray.util", ModuleType("ray.util"))
        monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)

    def together(self) -> Iterator[tuple[str, tuple[bytes, ...]]]:
        """Machine and what ran there at one time, where anything did."""
        return ((name, here) for name, here in self.ran if here)
