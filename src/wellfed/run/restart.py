"""Goes on from the last checkpoint where memory ran out in a step that can't be done again, with what needs less.

All is made anew in the same process, as in a run that is resumed: data, model, optimizer, loaders. What the failed
training has left in memory is let go before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from wellfed.config.schema import OnOom, RunConfig
from wellfed.errors import OutOfMemoryExhausted, RestartNeeded
from wellfed.plan.run_plan import Decided, RunPlan, Section
from wellfed.run.folder.resume import latest_checkpoint
from wellfed.units import counted

MOST_RESTARTS = 8
"""Halving a batch of 256 takes as many."""
MOST_UNCHANGED = 2
"""Without any change, where another program may have held the memory for a while."""
_NO_CHANGE = "nothing changed"


class Restarts:
    """Those of one run, and what was changed for them."""

    def __init__(self, folder: Path, began_with: Path | None) -> None:
        """``began_with``: the checkpoint that the run goes on from, of whatever run; None = it has begun afresh."""
        self._folder, self._began_with = folder, began_with
        self._tried: list[str] = []

    def checkpoint_for(self, needed: RestartNeeded) -> Path | None:
        """Where the run is to go on; None = from its beginning.

        Raises:
            OutOfMemoryExhausted: it was begun anew often enough.
        """
        change = show_changes(needed.changes) or _NO_CHANGE
        is_vain = change == _NO_CHANGE and self._tried.count(change) == MOST_UNCHANGED
        if len(self._tried) == MOST_RESTARTS or is_vain:
            times, tried = counted(len(self._tried), "time"), ", then ".join(self._tried)
            message = f"{needed} The run has been restarted {times} ({tried}), and is not again."
            raise OutOfMemoryExhausted(message, needed.kind)
        self._tried.append(change)
        return latest_checkpoint(self._folder) or self._began_with


def may_restart(config: RunConfig, *, is_measured: bool) -> bool:
    """Several ranks would have to meet anew; a measurement is of the settings that were asked."""
    return config.memory.on_oom is OnOom.retry and config.trainer.world_size == 1 and not is_measured


def show_changes(changes: Mapping[str, object]) -> str:
    """As they would be typed."""
    return " ".join(f"{knob}={str(value).lower()}" for knob, value in changes.items())


def with_changes(
    config: RunConfig, plan: RunPlan, changes: Mapping[str, object], why: str
) -> tuple[RunConfig, RunPlan]:
    """Configuration and plan with other values of some knobs: of what is planned the plan's, else the configuration's.

    Args:
        why: the reason of these numbers in the plan.
    """
    sections = {each.name: getattr(plan, each.name) for each in fields(plan)}
    planned = {one.group: (name, one) for name, one in sections.items() if isinstance(one, Section)}
    for dotted, value in changes.items():
        group, _, knob = dotted.partition(".")
        name, section = planned.get(group, ("", None))
        if section is not None and knob in section.reasons:
            section = section.but(**{knob: Decided(value, why, "measured")})
            planned[group] = name, section
            plan = replace(plan, **{name: section})  # type: ignore[arg-type]
        else:
            config = _changed(config, dotted.split("."), value)
    return config, plan


def _changed(node: Any, path: list[str], value: object) -> Any:
    """A copy with another value at a path through dataclasses and mappings."""
    if not path:
        return value
    name, *rest = path
    if is_dataclass(node) and not isinstance(node, type):
        return replace(node, **{name: _changed(getattr(node, name), rest, value)})
    inner = {} if node is None else dict(node)
    return {**inner, name: _changed(inner.get(name), rest, value)}
