"""Restarts from a checkpoint with less memory, after an out-of-memory error in a step that can't be repeated.

Data, model, optimizer and loaders are made anew in the same process, as in a resumed run. Memory of the failed training
is freed first. Several ranks restart together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from wellfed.config.schema import RunConfig
from wellfed.errors import OutOfMemoryExhausted, RestartNeeded
from wellfed.plan.run_plan import Decided, RunPlan, Section
from wellfed.ranks import largest_share
from wellfed.run.folder.resume import latest_checkpoint
from wellfed.units import counted

MOST_RESTARTS = 12
"""Maximum number of restarts of a run: eight halve a batch of 256, four take the other fallbacks."""


class Restarts:
    """Restarts of one run, with the changes for each."""

    def __init__(
        self,
        folder: Path,
        began_with: Path | None,
        all_gather: Callable[[str, Any], list[Any]] = lambda kind, own: [own],
    ) -> None:
        """
        Args:
            began_with: checkpoint of any run that the run started from; None = it began without one.
            all_gather: gives each rank the objects of all ranks, in their order.
        """
        self._folder, self._began_with, self._all_gather = folder, began_with, all_gather
        self._tried: list[str] = []
        self._was_suspect = False

    def checkpoint_for(self, needed: RestartNeeded) -> Path | None:
        """Returns the checkpoint to restart from, rank 0's on all ranks; None = from the beginning.

        Raises:
            OutOfMemoryExhausted: the run was restarted too often, or not all machines have the checkpoint.
        """
        if len(self._tried) == MOST_RESTARTS:
            raise OutOfMemoryExhausted(f"{needed} {self._history()}, and is not again.", needed.kind)
        if needed.is_suspect and self._was_suspect:
            message = f"{needed} Less memory has not helped before: this error may have another cause."
            raise OutOfMemoryExhausted(message, needed.kind)
        self._was_suspect = needed.is_suspect
        self._tried.append(show_changes(needed.changes))
        own = latest_checkpoint(self._folder) or self._began_with
        checkpoint: Path | None = self._all_gather("checkpoint", own and own.resolve())[0]
        if not all(self._all_gather("is there", checkpoint is None or checkpoint.is_file())):
            message = f"{needed} The run can't go on by itself, since {checkpoint} is not on the disk of all machines."
            raise OutOfMemoryExhausted(message, needed.kind)
        return checkpoint

    def add_to(self, error: OutOfMemoryExhausted) -> None:
        """Adds the restarts so far to the message of the error that ends the run."""
        if self._tried:
            error.args = (f"{error} {self._history()}.",)

    def _history(self) -> str:
        return f"The run has been restarted {counted(len(self._tried), 'time')} ({', then '.join(self._tried)})"


def show_changes(changes: Mapping[str, object]) -> str:
    """Returns changes as overrides to type."""
    return " ".join(f"{knob}={str(value).lower()}" for knob, value in changes.items())


def with_changes(
    config: RunConfig, plan: RunPlan, changes: Mapping[str, object], why: str
) -> tuple[RunConfig, RunPlan]:
    """Returns configuration and plan with other values of some knobs, in the plan if it has the knob.

    Args:
        why: reason of these values in the plan.
    """
    changes = dict(changes)
    if "memory.micro_batch" in changes:
        samples = largest_share(plan.workload.effective_batch_size, plan.trainer.world_size)
        changes.setdefault("memory.accumulate", largest_share(samples, int(str(changes["memory.micro_batch"]))))
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
    """Returns a copy with another value at a path through dataclasses and mappings."""
    if not path:
        return value
    name, *rest = path
    if is_dataclass(node) and not isinstance(node, type):
        return replace(node, **{name: _changed(getattr(node, name), rest, value)})
    inner = {} if node is None else dict(node)
    return {**inner, name: _changed(inner.get(name), rest, value)}
