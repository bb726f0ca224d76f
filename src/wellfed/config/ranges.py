"""The range of every number among the knobs, as one table."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from wellfed.config.schema import RunConfig
from wellfed.errors import Fault


@dataclass(frozen=True)
class Range:
    """What a number must satisfy; null is let through where the schema allows it."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def holds(self, value: float) -> bool:
        """Whether a finite ``value`` lies within; NaN and infinity never do."""
        return (
            math.isfinite(value)
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        limits = ((">=", self.at_least), (">", self.above), ("<=", self.at_most), ("<", self.below))
        return " and ".join(f"{sign} {_show(limit)}" for sign, limit in limits if limit is not None)


_COUNT = Range(at_least=1)
_COUNT_OR_NONE = Range(at_least=0)
_POSITIVE = Range(above=0)

RANGES: dict[str, Range] = {
    "seed": Range(at_least=0, below=2**63),
    "gpu.memory_gib": _POSITIVE,
    "loader.num_workers": _COUNT_OR_NONE,
    "loader.prefetch_factor": _COUNT,
    "loader.device_prefetch": _COUNT_OR_NONE,
    "loader.worker_threads": _COUNT,
    "loader.timeout_s": _COUNT_OR_NONE,
    "loader.skip_ids": _COUNT_OR_NONE,
    "loader.max_skipped": _COUNT_OR_NONE,
    "memory.micro_batch": _COUNT,
    "memory.accumulate": _COUNT,
    "memory.plateau_frac": Range(above=0, at_most=1),
    "memory.micro_batch_steps": _COUNT,
    "workload.effective_batch_size": _COUNT,
    "workload.schedule.warmup_steps": _COUNT_OR_NONE,
    "workload.schedule.min_lr_frac": Range(at_least=0, at_most=1),
    "trainer.max_epochs": _COUNT,
    "trainer.max_steps": _COUNT,
    "trainer.max_time_s": _POSITIVE,
    "trainer.validate_every_steps": _COUNT,
    "trainer.checkpoint_every_steps": _COUNT,
    "trainer.checkpoint_minutes": _POSITIVE,
    "trainer.keep_last": _COUNT,
    "trainer.log_every_steps": _COUNT,
    "trainer.gradient_clip": _POSITIVE,
    "trainer.devices": _COUNT,
    "trainer.limit_batches": _COUNT,
    "trainer.overfit_batches": _COUNT,
    "trainer.profile_steps": _COUNT,
    "telemetry.interval_s": Range(at_least=0.1, at_most=3600),
    "telemetry.ceiling_steps": _COUNT_OR_NONE,
    "sweep.max_trials": _COUNT,
    "sweep.trial_steps": Range(at_least=10),
    "sweep.timeout_s": Range(above=0, at_most=1e6),
}
"""Dotted knob -> range; a list must satisfy it with every entry. A test holds it against the schema's numbers."""


def range_faults(config: Any) -> Iterator[Fault]:
    """A fault for each number out of range."""
    for dotted, allowed in RANGES.items():
        value = value_of(config, dotted)
        for number in value if isinstance(value, list) else [value]:
            if number is not None and not allowed.holds(number):
                way_out = _legal_entries(dotted, value) if isinstance(value, list) else _legal(allowed, number)
                yield Fault(f"{dotted}={_show_value(value)}", f"must be {allowed}.", f"Set {dotted}={way_out}.")
                break


def value_of(config: Any, dotted: str) -> Any:
    """The value of a dotted knob."""
    for name in dotted.split("."):
        config = getattr(config, name)
    return config


def _legal(allowed: Range, value: float) -> str:
    """A value in range, to type."""
    if allowed.at_least is not None:
        return _show(allowed.at_least)
    return _show(1 if isinstance(value, int) or allowed.at_most is None else allowed.at_most)


def _legal_entries(dotted: str, values: list[Any]) -> str:
    """The entries in range, to type; the default if there are none. None is made up: an entry may name a sample."""
    kept = [value for value in values if RANGES[dotted].holds(value)] or value_of(RunConfig(), dotted)
    return "null" if kept is None else _show_value(kept)


def _show(number: float) -> str:
    return "2**63" if number == 2**63 else f"{number:g}"


def _show_value(value: Any) -> str:
    return str(value).replace(" ", "") if isinstance(value, list) else str(value)
