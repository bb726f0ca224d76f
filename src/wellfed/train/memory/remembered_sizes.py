"""Stores values on disk that a run lowered after running out of memory, for the next run of the same plan.

Each plan has a file, ``<cache_dir>/memory/<digest>/remembered.json``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from wellfed.record import text_of, write_atomically

KIND = "memory"
"""Folder below ``paths.cache_dir``."""
FILE_NAME = "remembered.json"
MICRO_BATCH = "memory.micro_batch"
FOREACH = "workload.optimizer.foreach"
_KNOBS = (MICRO_BATCH, FOREACH)
_FORMAT = 1


@dataclass(frozen=True)
class Lowered:
    """A knob that had to be lowered."""

    value: int | bool
    """Value that training continued with."""
    before: int | bool | None
    """Value with which memory ran out."""
    on: str
    """Day, such as 2026-11-22."""
    run: str

    @property
    def when(self) -> str:
        """Text such as ``ran out of memory on 2026-11-22 (run NAME)``."""
        return f"ran out of memory on {self.on} (run {self.run})"


def file_for(cache_dir: Path, *decisive: object) -> Path:
    """Returns the file of a plan.

    Args:
        decisive: JSON values of everything that decides the memory of a step.
    """
    content = json.dumps(decisive, sort_keys=True)
    return cache_dir / KIND / hashlib.sha256(content.encode()).hexdigest()[:16] / FILE_NAME


def recall(file: Path) -> dict[str, Lowered]:
    """Returns the lowered values in a file, by knob; empty if there is no file.

    Raises:
        OSError: it can't be read.
        ValueError: it is damaged, or has another format.
    """
    try:
        kept = json.loads(text_of(file, errors="replace"))
        if kept["format"] != _FORMAT:
            raise ValueError(f"format {kept['format']!r}")
        found = {knob: Lowered(**entry) for knob, entry in kept["lowered"].items() if knob in _KNOBS}
        if not found or not all(_is_sound(knob, one) for knob, one in found.items()):
            raise ValueError("no such values")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError("is no file of sizes that had to be lowered") from error
    return found


def remember(file: Path, knob: str, lowered: Lowered) -> None:
    """Adds a value to a file; of two sizes the smaller one stays. A damaged file is replaced.

    Runs that do so at the same time wait for each other, but not for long, since this runs within a step: after
    `SILENT_WAIT_S` of `wellfed.data.prepared` the file is written anyway.

    Raises:
        OSError: it can't be written.
    """
    from wellfed.data.prepared import only_builder  # imports filelock, which readers do not need

    with only_builder(file.parent, is_patient=False):
        kept: Mapping[str, Lowered] = {}
        with suppress(ValueError):
            kept = recall(file)
        if knob in kept and kept[knob].value <= lowered.value:
            return
        entries = {name: asdict(one) for name, one in {**kept, knob: lowered}.items()}
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, json.dumps({"format": _FORMAT, "lowered": entries}, indent=1) + "\n")


def from_event(kind: str, facts: Mapping[str, Any], *, on: date, run: str) -> tuple[str, Lowered] | None:
    """Returns the knob that an event of a run lowered when memory ran out; None for other events."""
    if kind == "step_down" and "micro_batch" in facts:  # an evaluation has another size
        return MICRO_BATCH, Lowered(facts["micro_batch"], facts["before"], on.isoformat(), run)
    if kind == "ladder" and facts.get("change") == f"{FOREACH}=false":
        return FOREACH, Lowered(False, None, on.isoformat(), run)
    return None


def _is_sound(knob: str, one: Lowered) -> bool:
    """Returns whether value and run are valid. Raises a TypeError or ValueError for an invalid day."""
    sizes = one.value, one.before
    is_size = all(type(size) is int for size in sizes) and 1 <= one.value < sizes[1]  # type: ignore[operator]
    is_value = is_size if knob == MICRO_BATCH else one.value is False
    return is_value and isinstance(one.run, str) and bool(date.fromisoformat(one.on))
