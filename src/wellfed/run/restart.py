"""Restarts with less memory from the last checkpoint, after an out-of-memory error in a step that can't be repeated.

One process makes data, model, optimizer and loaders anew, as in a resumed run (`Restarts`). Ranks that wait in a
collective can't do so. Rank 0, which has started the others, ends them and replaces itself by the same command
(`RestartOfRanks`).
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from wellfed.config.quoting import assigned
from wellfed.config.schema import RunConfig
from wellfed.errors import EXIT_OUT_OF_MEMORY, OutOfMemoryExhausted, RestartNeeded
from wellfed.plan.run_plan import Decided, RunPlan, Section
from wellfed.ranks import INVITATION, largest_share
from wellfed.record.entries import RunRecord
from wellfed.run.folder.resume import latest_checkpoint
from wellfed.train.loop.place import own_command
from wellfed.units import counted

MOST_RESTARTS = 12
"""Maximum number of restarts of a run: eight halve a batch of 256, four take the other fallbacks."""
_FILE, _REASON, _TIMES = ".restart.json", "WELLFED_RESTART", "WELLFED_RESTARTS"
"""File in the run folder with which a rank asks for a restart; environment variables of the restarted command. The last
has the number of restarts, and reaches its other ranks too."""
_POLL_S, _WAIT_S = 0.5, 60.0


class Restarts:
    """Restarts of a run of one process, with the changes for each."""

    def __init__(self, folder: Path, began_with: Path | None) -> None:
        """``began_with``: checkpoint of any run that the run started from; None = it began without one."""
        self._folder, self._began_with = folder, began_with
        self._tried: list[str] = []

    def checkpoint_for(self, needed: RestartNeeded) -> Path | None:
        """Returns the checkpoint to restart from; None = from the beginning.

        Raises:
            OutOfMemoryExhausted: the run was restarted too often.
        """
        if len(self._tried) == MOST_RESTARTS:
            raise OutOfMemoryExhausted(f"{needed} {self._history()}, and is not again.", needed.kind)
        self._tried.append(show_changes(needed.changes))
        return latest_checkpoint(self._folder) or self._began_with

    def add_to(self, error: OutOfMemoryExhausted) -> None:
        """Adds the restarts so far to the message of the error that ends the run."""
        if self._tried:
            error.args = (f"{error} {self._history()}.",)

    def _history(self) -> str:
        return f"The run has been restarted {counted(len(self._tried), 'time')} ({', then '.join(self._tried)})"


class RestartOfRanks:
    """Restart of ranks that rank 0 has started. Make it before they start, since their environment is rank 0's too."""

    def __init__(self, folder: Path) -> None:
        """``folder``: the run folder, in which any rank asks for a restart."""
        self._folder = folder
        self._environ = {name: value for name, value in os.environ.items() if name != INVITATION}
        self.times = int(os.environ.get(_TIMES, "0"))
        """Restarts so far."""

    def listen(self) -> None:
        """Restarts all ranks as soon as one asks for it. A thread does, since rank 0 may wait in a collective."""
        threading.Thread(target=self._listen, name="wellfed-restart", daemon=True).start()

    def ask(self, needed: RestartNeeded, rank: int, events: Sequence[Mapping[str, Any]]) -> None:
        """Asks rank 0 for a restart, which ends this process. Returns if rank 0 does not answer.

        Args:
            events: those of this rank's record. The last `oom`, and what followed, go to the restarted run.
        """
        began = max((at for at, event in enumerate(events) if event["kind"] == "oom"), default=len(events))
        reason = {
            "because": str(needed),
            "changes": needed.changes,
            "events": [{**event, "rank": rank} for event in events[began:]],
        }
        written = self._folder / f"{_FILE}.{os.getpid()}"
        written.write_text(json.dumps(reason), encoding="utf-8")
        written.replace(self._folder / _FILE)
        time.sleep(_WAIT_S)

    def _listen(self) -> None:
        file = self._folder / _FILE
        while not file.exists():
            time.sleep(_POLL_S)
        time.sleep(_POLL_S)  # rank 0 may be writing a checkpoint
        reason = file.read_text(encoding="utf-8")
        file.unlink()
        changes, checkpoint = json.loads(reason)["changes"], latest_checkpoint(self._folder)
        where = "No checkpoint yet: starting again" if checkpoint is None else f"Restarting from {checkpoint.name}"
        print(f"{json.loads(reason)['because']}\n{where} with {show_changes(changes)}", flush=True)
        # A resume refuses a run whose process, which is this one, is alive.
        replace(RunRecord.read(self._folder), status="oom", exit_code=EXIT_OUT_OF_MEMORY).write(self._folder)
        for child in psutil.Process().children(recursive=True):
            child.kill()
        words = words_again(own_command(), changes, None if checkpoint is None else self._folder)
        os.execve(sys.executable, words, {**self._environ, _REASON: reason, _TIMES: str(self.times + 1)})


def words_again(words: list[str], changes: Mapping[str, object], folder: Path | None) -> list[str]:
    """Returns the words of a command that makes the same training with changes.

    Args:
        folder: run that it resumes; None = it begins a run, in a new folder, since a typed one holds this run.
    """
    if "memory.micro_batch" in changes:
        changes = {**changes, "memory.accumulate": "null"}
    more = [f"++{show_changes({knob: value})}" for knob, value in changes.items()]
    left_out = {*changes, *(["hydra.run.dir"] if folder is None else ["resume", "rerun"])}
    if folder is not None:
        more.append(assigned("resume", str(folder)))
    return [*(word for word in words if word.lstrip("+").partition("=")[0] not in left_out), *more]


def reason_of_restart() -> dict[str, Any] | None:
    """Returns why another process has restarted this command, once: ``because``, ``changes`` and ``events`` of the rank
    that asked; None = it did not."""
    reason = os.environ.pop(_REASON, None)
    return None if reason is None else json.loads(reason)


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
