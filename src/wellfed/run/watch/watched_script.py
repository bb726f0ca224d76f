"""Watches what this process trains: as a script is run by ``wellfed watch``, or within a ``with`` block."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import time
import warnings
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from wellfed.monitor.error_guard import Harmless, harmless
from wellfed.ranks import Launch, launched, own_rank
from wellfed.run.folder.log import StderrHandler
from wellfed.run.watch.script_process import Script, ScriptEnd, process_group, when_torch_is_imported

if TYPE_CHECKING:  # imports torch
    from wellfed.run.watch.ranks_of_script import RankOfScript
    from wellfed.run.watch.script_steps import ScriptSteps
    from wellfed.run.watch.torch_marks import TorchMarks

_LOG = logging.getLogger("wellfed")


class WatchedScript(Harmless):
    """Watch of this process from `start` to `finish`. Its errors are logged, and do not reach the script.

    It begins when torch is imported, and makes a run folder at the first sign of a training. Of several ranks, the
    first one makes the folder. The others, if torchrun has started them, leave their figures for it. A process that the
    script forks is watched only if the script has not trained before.

    Args:
        log_dir: folder in which ``watch/runs/`` has the run folders.
    """

    current: ClassVar[WatchedScript | None] = None
    """Watch of this process that has begun and not ended."""

    def __init__(self, script: Script, log_dir: Path) -> None:
        self._script, self._log_dir = script, log_dir.absolute()
        self._origin_s = time.monotonic()
        self._pid, self._parent = os.getpid(), multiprocessing.parent_process()
        group = process_group()  # of ranks that the script itself starts
        self._rank, self._launch = own_rank() or (0 if group is None else group.get_rank()), _launch_with_store()
        self._record: RankOfScript | None = None
        self._steps: ScriptSteps | None = None
        self._marks: TorchMarks | None = None
        self._handler = StderrHandler()
        self._handler.setFormatter(logging.Formatter("wellfed watch: %(message)s"))
        self._handler.setLevel(logging.WARNING)
        self._propagates = True
        """Whether the log has passed messages on before the watch."""
        self._filters: list[Any] = []
        """Our own filter of warnings, once it is in use."""

    def start(self) -> None:
        """Begins the watch once torch is imported. Does nothing within another watch, or on a rank that can't leave its
        figures for the first one."""
        if WatchedScript.current is not None or (self._rank > 0 and self._launch is None):
            return
        WatchedScript.current = self
        _LOG.addHandler(self._handler)
        self._propagates, _LOG.propagate = _LOG.propagate, False  # the script's own log must not hold our messages
        _watch_forks()
        when_torch_is_imported(self._install)

    def abandon(self) -> None:
        """Restores torch's methods."""
        if self._marks is not None:
            self._marks.remove()

    @harmless
    def _install(self) -> None:
        from wellfed.run.watch.ranks_of_script import RankOfScript, TorchrunStore
        from wellfed.run.watch.script_record import ScriptRecord
        from wellfed.run.watch.script_steps import ScriptSteps
        from wellfed.run.watch.torch_marks import TorchMarks

        store = None if self._launch is None else TorchrunStore(self._launch)
        if self._rank > 0:
            self._record = RankOfScript(origin_s=self._origin_s, store=store)
        else:
            self._record = ScriptRecord(self._script, self._log_dir, origin_s=self._origin_s, store=store)
        self._steps = ScriptSteps(self._record, self._parent)
        self._marks = TorchMarks(self._steps, self._record)
        self._marks.install()

    def finish(self, end: ScriptEnd) -> None:
        """Ends the watch, completes the files, and shows the last screen on stderr."""
        if WatchedScript.current is not self:
            return
        WatchedScript.current = None
        if os.getpid() == self._pid:
            self._finish(end)
        _LOG.removeHandler(self._handler)
        _LOG.propagate = self._propagates

    @harmless
    def _finish(self, end: ScriptEnd) -> None:
        record, steps = self._record, self._steps
        if steps is not None:
            steps.finish(has_error=end.error is not None)
        self.abandon()
        if record is None or not record.is_open:
            if self._rank == 0 and (steps is None or not steps.has_failed):  # else it is reported already
                self._show_nothing_seen()
            return
        if steps is not None and steps.has_failed:
            record.note("The watch failed, and saw nothing of what came later.")
        if self._rank > 0:
            record.finish(end)
            return
        from wellfed.run.watch.script_record import ScriptRecord

        assert isinstance(record, ScriptRecord)
        evidence = record.finish(end)
        from wellfed.explain.report.text_table import PIPED_COLUMNS
        from wellfed.run import screen

        console = screen.Terminal(stderr=True, width=None if sys.stderr.isatty() else PIPED_COLUMNS)
        assert record.folder is not None
        folder, here = record.folder, Path.cwd()
        screen.show_end(console, evidence, folder.relative_to(here) if folder.is_relative_to(here) else folder)

    def _show_nothing_seen(self) -> None:
        why = "it did not import torch"
        if self._record is not None:
            why = (
                "this process read no DataLoader and stepped no optimizer, and processes that it forks are not watched"
            )
        print(f"wellfed watch: no training was seen: {why}.", file=sys.stderr)

    def has_forked(self) -> None:
        """Keeps our threads from making the script's forks warn. A change of filters repeats warnings already shown."""
        if sys.version_info >= (3, 12) and warnings.filters[:1] != self._filters:
            warnings.filterwarnings("ignore", "This process .* is multi-threaded, use of fork", DeprecationWarning)
            self._filters = list(warnings.filters[:1])

    def is_forked(self) -> None:
        """Ends the watch in a forked process, unless it may be the one that trains, as a daemon's."""
        if self._record is not None and self._record.is_open:
            if self._steps is not None:
                self._steps.is_off = True
        else:
            self._pid = os.getpid()


def _launch_with_store() -> Launch | None:
    """Returns the launch of several ranks by torchrun, if it serves a store for them; else None."""
    launch = launched()
    if launch is None or launch.by != "torchrun" or launch.world_size == 1:
        return None
    return launch if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else None


@cache
def _watch_forks() -> None:
    """Calls the current watch after each fork from here on. Python can not forget such functions."""

    def has_forked() -> None:
        if WatchedScript.current is not None:
            WatchedScript.current.has_forked()

    def is_forked() -> None:
        if WatchedScript.current is not None:
            WatchedScript.current.is_forked()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_parent=has_forked, after_in_child=is_forked)
