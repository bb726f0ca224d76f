"""Holds what was typed for a knob or group that varies, without Hydra's own types."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Varied:
    """One axis of a command line."""

    typed: str
    """Knob, or group, and all behind it."""
    values: tuple[str, ...] = ()
    """Values as typed, in order, none twice; empty for an interval."""
    interval: tuple[float, float] | None = None
    """Start and end."""
    is_whole: bool = False
    """Whether only whole numbers of the interval count: ``int(interval(..))``."""
    is_range: bool = False
    """``values`` are those of a range."""
    tags: frozenset[str] = frozenset()
    """Tags of the value, as in ``tag(log, ..)``."""
