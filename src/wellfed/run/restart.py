"""Restarts a run with less memory from its last checkpoint, after an out-of-memory error in a step that can't be
repeated.

The process replaces itself by the same command with ``resume=<run folder>`` and the changes, which frees all that it
held. Several ranks wait in a collective, so rank 0, which has started the others, ends them and then does the same.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from wellfed.command_line import is_started_by
from wellfed.config.compose import Composed
from wellfed.config.quoting import assigned
from wellfed.errors import EXIT_OUT_OF_MEMORY, RestartNeeded
from wellfed.ranks import INVITATION
from wellfed.record.entries import RunRecord
from wellfed.run.folder.resume import latest_checkpoint
from wellfed.run.folder.run_folder import RunFolder

MOST_RESTARTS = 12
"""Maximum number of restarts of a run: eight halve a batch of 256, four take the other fallbacks."""
_FILE, _REASON, _TIMES = ".restart.json", "WELLFED_RESTART", "WELLFED_RESTARTS"
"""File in the run folder with which a rank asks for a restart; environment variables of the restarted command. The last
has the number of restarts, and reaches its other ranks too."""
_OF_MEMORY = ("oom", "step_down", "ladder", "restart")
_POLL_S, _WAIT_S = 0.5, 60.0


class Restarts:
    """Restarts of a run by its own command. Make it before anything changes environment or working directory."""

    def __init__(self) -> None:
        self.reason: dict[str, Any] | None = json.loads(os.environ.pop(_REASON, "null"))
        """Why this command was restarted: ``because``, ``changes`` and ``events``; None = it was not."""
        self.times = int(os.environ.get(_TIMES, "0"))
        """Restarts so far."""
        self._environ = {name: value for name, value in os.environ.items() if name != INVITATION}
        self._working = Path.cwd()

    def why_not(self, needed: RestartNeeded, composed: Composed[Any], *, is_own: bool) -> str | None:
        """Returns why this run is not restarted, or what the user does instead; None if it may be.

        Args:
            is_own: this run has started its ranks itself.
        """
        if is_own and is_started_by("train") and not composed.is_job_of_many and self.times < MOST_RESTARTS:
            return None
        settings = f" with {show_changes(needed.changes)}" if needed.changes else ""
        before = f" It has been restarted {self.times} times." if self.times else ""
        return f"Start it again{settings}.{before}"

    def listen(self, folder: RunFolder) -> None:
        """Restarts all ranks as soon as one asks for it. A thread does, since rank 0 may wait in a collective."""

        def wait() -> None:
            file = folder.path / _FILE
            while not file.exists():
                time.sleep(_POLL_S)
            time.sleep(_POLL_S)  # rank 0 may be writing a checkpoint
            reason = json.loads(file.read_text(encoding="utf-8"))
            file.unlink()
            self.now(folder, reason)

        threading.Thread(target=wait, name="wellfed-restart", daemon=True).start()

    def now(self, folder: RunFolder, reason: dict[str, Any]) -> None:
        """Ends this process and those that it has started, and begins the same command again.

        Args:
            reason: what `reason_of` returns.
        """
        import psutil

        from wellfed.train.loop.place import own_command

        os.chdir(self._working)
        changes, checkpoint = reason["changes"], latest_checkpoint(folder.path)
        where = "No checkpoint yet: starting again" if checkpoint is None else f"Restarting from {checkpoint.name}"
        print(f"{reason['because']}\n{where} with {show_changes(changes)}", flush=True)
        record = RunRecord.read(folder.path)
        # A resume refuses a run whose process, which is this one, is alive.
        ended = replace(record, status="oom", exit_code=EXIT_OUT_OF_MEMORY)
        ended.write(folder.path)
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        for left in folder.path.glob(f"{_FILE}*"):  # of a second rank that has run out of memory
            left.unlink(missing_ok=True)
        if checkpoint is None:
            reason["events"] = [each for each in record.events if each["kind"] in _OF_MEMORY] + reason["events"]
            if folder.is_new:
                shutil.rmtree(folder.path, ignore_errors=True)
                folder.path.mkdir(exist_ok=True)
                ended.write(folder.path)  # stays if the new command is killed before it has its own
        words = words_again(own_command(), changes, folder, resumes=checkpoint is not None)
        environ = {**self._environ, _REASON: json.dumps(reason), _TIMES: str(self.times + 1)}
        os.execve(sys.executable, words, environ)


def ask(folder: Path, reason: Mapping[str, Any]) -> None:
    """Asks rank 0, which listens, for a restart. That ends this process. Returns if rank 0 does not answer."""
    written = folder / f"{_FILE}.{os.getpid()}"
    written.write_text(json.dumps(reason), encoding="utf-8")
    written.replace(folder / _FILE)
    time.sleep(_WAIT_S)


def reason_of(needed: RestartNeeded, events: Sequence[Mapping[str, Any]] = (), **about: int) -> dict[str, Any]:
    """Returns what the restarted command gets to know, as JSON can hold it.

    Args:
        events: those of a rank's record, which rank 0's does not have. The last `oom`, and what followed, are kept.
        about: more facts for each event.
    """
    began = max((at for at, event in enumerate(events) if event["kind"] == "oom"), default=len(events))
    kept = [{**event, **about} for event in events[began:]]
    return {"because": str(needed), "changes": needed.changes, "events": kept}


def words_again(words: list[str], changes: Mapping[str, object], folder: RunFolder, *, resumes: bool) -> list[str]:
    """Returns the words of a command that makes the same training with changes.

    Args:
        folder: of the run so far. The new one resumes it, or begins in it if it was new, else in another one.
    """
    asked = dict(changes)
    if "memory.accumulate" in asked:  # of a LightningModule, whose samples may be unknown
        asked["memory.micro_batch"] = "null"
    elif "memory.micro_batch" in asked:
        asked["memory.accumulate"] = "null"
    more = [f"++{show_changes({knob: value})}" for knob, value in asked.items()]
    left_out = {*asked, "hydra.run.dir"}
    if resumes:
        left_out |= {"resume", "rerun"}
        more.append(assigned("resume", str(folder.path)))
    elif folder.is_new:
        more.append(assigned("hydra.run.dir", str(folder.path)))
    return [*(word for word in words if word.lstrip("+").partition("=")[0] not in left_out), *more]


def show_changes(changes: Mapping[str, object]) -> str:
    """Returns changes as overrides to type."""
    return " ".join(f"{knob}={str(value).lower()}" for knob, value in changes.items())
