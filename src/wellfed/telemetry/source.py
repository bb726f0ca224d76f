"""What the sampler asks of whatever it samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol


class Reading(NamedTuple):
    """Figures of one GPU, or of the host, at the moment."""

    gpu: int
    """CUDA-visible number, or `metrics.HOST`."""
    values: Mapping[str, float]
    """By metric name."""


class Source(Protocol):
    """Something to read; always from the one thread that the sampler gives it."""

    name: str

    @property
    def waits_for_step_end(self) -> bool:
        """Its figures are means since the reading before, so readings are best taken where steps end."""
        ...

    def read(self, *, slow: bool, edge: bool = False) -> Iterable[Reading]:
        """Read what is due, and what is dear only if ``slow``; at an ``edge`` of training only what is counted over
        time. Each reading is to be had as soon as it is there. May block; must not raise for what is not offered."""
        ...

    def close(self) -> None:
        """No more readings follow."""
        ...


class Tell(Protocol):
    """Where events of the run go."""

    def __call__(self, kind: str, **facts: object) -> None:
        """Something happened, with what there is to know of it."""
        ...
