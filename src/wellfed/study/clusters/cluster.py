"""Names what is handed to a cluster and what comes back; the doors to Ray and submitit offer the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from wellfed.study.clusters.keeper import OrderEnd, ProcessSettings


@dataclass(frozen=True)
class Order:
    """What one process is to do once."""

    key: str
    """Tells orders apart."""
    content: bytes
    num_gpus: int = 0
    hosts: frozenset[str] | None = None
    """Machines that may do it; None = any."""


@dataclass(frozen=True)
class Ended:
    """What became of one."""

    key: str
    told: OrderEnd
    seconds: float
    """Since it was handed over."""


class ClusterLost(Exception):
    """Nothing more can be done there; the text says why."""


class Cluster(Protocol):
    """Machines that do orders."""

    most_gpus: int | None
    """Of one machine, once `open` has seen it; None = nobody knows here."""

    def open(self, settings: ProcessSettings, say: Callable[[str], None]) -> None:
        """Reach it; ``settings`` say what does the orders there, ``say`` takes what a user must know meanwhile.

        Raises:
            ConfigError: it can't be reached, or what was asked of it makes no sense.
        """

    def run(self, orders: Sequence[Order], *, alone: bool) -> Iterator[Ended | None]:
        """Each order when it has ended, until all have; None a few times a second.

        Args:
            alone: one at a time on a machine.

        Raises:
            ClusterLost: what is left can't be done.
        """

    def start_no_more(self) -> None:
        """What runs goes on; what waits is not started."""

    def close(self) -> None:
        """Let go of it; whatever still runs there for us is ended."""
