"""Watches what this process trains: as a script is run by ``wellfed watch``, or within a ``with`` block."""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from wellfed.ranks import Launch, launched, own_rank
from wellfed.run.folder.log import StderrHandler
from wellfed.watch.error_guard import Harmless, harmless
from wellfed.watch.script_process import Script, ScriptEnd, process_group, when_torch_is_imported

if TYPE_CHECKING:  # imports torch
    from wellfed.watch.ranks_of_script import RankOfScript
    from wellfed.watch.script_steps import ScriptSteps
    from wellfed.watch.torch_marks import TorchMarks

_LOG = logging.getLogger("wellfed")


class WatchedScript(Harmless):
    """Watch of this process from `start` to `finish`. Its errors are logged, and do not reach the script.

    It begins when torch is imported, and makes a run folder at the first sign of a training. Of several ranks, the
    first one makes the folder. The others, if torchrun has started them, leave their figures for it. Processes that the
    script starts are not watched.

    Args:
        log_dir: folder in which ``watch/runs/`` has the run folders.
        options: further arguments of `ScriptRecord`.
    """

    current: ClassVar[WatchedScript | None] = None
    """Watch of this process that has begun and not ended."""

    def __init__(self, script: Script, log_dir: Path, **options: Any) -> None:
        self._script, self._log_dir, self._options = script, log_dir.absolute(), options
        self._origin_s, self._pid = time.monotonic(), os.getpid()
        group = process_group()  # of ranks that the script itself starts
        self._rank, self._launch = own_rank() or (0 if group is None else group.get_rank()), _launch_with_store()
        self.record: RankOfScript | None = None
        """Its record, once torch is imported."""
        self._steps: ScriptSteps | None = None
        self._marks: TorchMarks | None = None
        self._handler = StderrHandler()
        self._handler.setFormatter(logging.Formatter("wellfed watch: %(message)s"))
        self._handler.setLevel(logging.WARNING)
        self._propagates = True
        """Whether the log has passed messages on before the watch."""

    def start(self) -> None:
        """Begins the watch once torch is imported. Does nothing within another watch, or on a rank that can't leave its
        figures for the first one."""
        if WatchedScript.current is not None or (self._rank > 0 and self._launch is None):
            return
        WatchedScript.current = self
        _LOG.addHandler(self._handler)
        self._propagates, _LOG.propagate = _LOG.propagate, False  # the script's own log must not hold our messages
        when_torch_is_imported(self._install)

    def abandon(self) -> None:
        """Restores torch's methods."""
        if self._marks is not None:
            self._marks.remove()

    @harmless
    def _install(self) -> None:
        from wellfed.watch.ranks_of_script import RankOfScript, TorchrunStore
        from wellfed.watch.script_record import ScriptRecord
        from wellfed.watch.script_steps import ScriptSteps
        from wellfed.watch.torch_marks import TorchMarks

        store = None if self._launch is None else TorchrunStore(self._launch)
        if self._rank > 0:
            self.record = RankOfScript(origin_s=self._origin_s, store=store)
        else:
            self.record = ScriptRecord(
                self._script, self._log_dir, origin_s=self._origin_s, store=store, **self._options
            )
        self._steps = ScriptSteps(self.record)
        self._marks = TorchMarks(self._steps, self.record)
        self._marks.install()

    def finish(self, end: ScriptEnd, *, is_shown: bool = True) -> None:
        """Ends the watch, completes the files, and shows the last screen on stderr."""
        if WatchedScript.current is not self:
            return
        WatchedScript.current = None
        if os.getpid() == self._pid:
            self._finish(end, is_shown=is_shown)
        _LOG.removeHandler(self._handler)
        _LOG.propagate = self._propagates

    @harmless
    def _finish(self, end: ScriptEnd, *, is_shown: bool) -> None:
        record, steps = self.record, self._steps
        if steps is not None:
            steps.finish(has_error=end.error is not None)
        self.abandon()
        if record is None or not record.is_open:
            if self._rank == 0 and (steps is None or not steps.has_failed):  # else it is reported already
                why = "it did not import torch"
                if record is not None:
                    why = "this process read no DataLoader and stepped no optimizer. Those it starts are not watched"
                print(f"wellfed watch: no training was seen: {why}.", file=sys.stderr)
            return
        if steps is not None and steps.has_failed:
            record.note("The watch failed, and saw nothing of what came later.")
        evidence = record.finish(end)
        if is_shown and evidence is not None:
            record.show(evidence)


class Watch:
    """Watch of the training within a ``with`` block: ``with wellfed.Watch():`` around the loop.

    It works for a plain loop, Accelerate, a Trainer of transformers, and Ray Train. The first process leaves a run
    folder, and shows the last screen on stderr. Other ranks of torchrun bring it their figures. Within another watch it
    does nothing.
    """

    def __init__(self, name: str | None = None, log_dir: str | Path = "logs") -> None:
        """
        Args:
            name: name of the training in its report; None = the script's.
            log_dir: folder in which ``watch/runs/`` has the run folders.
        """
        self._script, self._log_dir = Script(name or Path(sys.argv[0]).name or "training"), Path(log_dir)
        self._watched: WatchedScript | None = None

    def __enter__(self) -> Self:
        self._watched = WatchedScript(self._script, self._log_dir)
        self._watched.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        watched, self._watched = self._watched, None
        if watched is not None:
            watched.finish(ScriptEnd(0 if error is None else 1, error))


def _launch_with_store() -> Launch | None:
    """Returns the launch of several ranks by torchrun, if it serves a store for them; else None."""
    launch = launched()
    if launch is None or launch.by != "torchrun" or launch.world_size == 1:
        return None
    return launch if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else None
