"""Keeps on disk what a run had to lower when memory ran out, so that the next run of the same plan begins there.

A file for each plan, ``<cache_dir>/memory/<digest>/remembered.json``. Plain values in, plain values out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from wellfed.record import write_atomically

KIND = "memory"
"""The folder below ``paths.cache_dir``."""
FILE_NAME = "remembered.json"
MICRO_BATCH = "memory.micro_batch"
FOREACH = "workload.optimizer.foreach"
_FORMAT = 1


@dataclass(frozen=True)
class Lowered:
    """A knob that had to be lowered."""

    value: int | bool
    """What training went on with."""
    before: int | bool | None
    """What memory had run out with."""
    on: str
    """The day, as in 2026-11-22."""
    run: str
    """The name of the run."""

    @property
    def when(self) -> str:
        """``ran out of memory on 2026-11-22 (run NAME)``."""
        return f"ran out of memory on {self.on} (run {self.run})"


def file_for(cache_dir: Path, *decisive: object) -> Path:
    """Where it is kept for a plan.

    Args:
        decisive: all that decides what memory a step takes, as values that JSON can hold.
    """
    content = json.dumps(decisive, sort_keys=True)
    return cache_dir / KIND / hashlib.sha256(content.encode()).hexdigest()[:16] / FILE_NAME


def recall(file: Path) -> dict[str, Lowered]:
    """What is kept there, by knob; empty where there is no file.

    Raises:
        OSError: it can't be read.
        ValueError: it is damaged, or of another make.
    """
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    try:
        kept = json.loads(text)
        if kept["format"] != _FORMAT:
            raise ValueError(f"format {kept['format']!r}")
        found = {knob: Lowered(**entry) for knob, entry in kept["lowered"].items() if knob in _IS_SOUND}
        if not found or not all(_IS_SOUND[knob](one) and _is_told(one) for knob, one in found.items()):
            raise ValueError("no such values")
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError("is no file of sizes that had to be lowered") from error
    return found


def remember(file: Path, knob: str, lowered: Lowered) -> None:
    """Add to what is kept there; of two sizes the smaller one stays. A file that is damaged is written anew.

    Raises:
        OSError: it can't be written.
    """
    kept: Mapping[str, Lowered] = {}
    with suppress(ValueError):
        kept = recall(file)
    if knob in kept and kept[knob].value <= lowered.value:
        return
    entries = {name: asdict(one) for name, one in {**kept, knob: lowered}.items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps({"format": _FORMAT, "lowered": entries}, indent=1) + "\n")


def from_event(kind: str, facts: Mapping[str, Any], *, on: date, run: str) -> tuple[str, Lowered] | None:
    """The knob that an event of a run tells to have been lowered for want of memory; None where it tells of none."""
    if kind == "step_down" and "micro_batch" in facts:  # of an evaluation it is another size
        return MICRO_BATCH, Lowered(facts["micro_batch"], facts["before"], on.isoformat(), run)
    if kind == "ladder" and facts.get("change") == f"{FOREACH}=false":
        return FOREACH, Lowered(False, None, on.isoformat(), run)
    return None


def _is_size(one: Lowered) -> bool:
    sizes = one.value, one.before
    return all(type(size) is int for size in sizes) and 1 <= one.value < sizes[1]  # type: ignore[operator]


_IS_SOUND: Mapping[str, Callable[[Lowered], bool]] = {MICRO_BATCH: _is_size, FOREACH: lambda one: one.value is False}


def _is_told(one: Lowered) -> bool:
    """Day and run can be shown."""
    return isinstance(one.run, str) and bool(date.fromisoformat(one.on))
