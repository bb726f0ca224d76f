"""Watches a training from within its code: a plain loop, Accelerate, a Trainer of transformers, Ray Train."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from wellfed.run.watch.script_process import Script, ScriptEnd
from wellfed.run.watch.watched_script import WatchedScript


class Watch:
    """Watch of the training within a ``with`` block: ``with wellfed.Watch():`` around the loop.

    The first process leaves a run folder, and shows the last screen on stderr. Other ranks of torchrun bring it their
    figures. Within another watch it does nothing.
    """

    def __init__(self, name: str | None = None, log_dir: str | Path = "logs") -> None:
        """
        Args:
            name: name of the training in its report; None = the script's.
            log_dir: folder in which ``watch/runs/`` has the run folders.
        """
        self._name, self._log_dir = name or Path(sys.argv[0]).name or "training", Path(log_dir)
        self._watched: WatchedScript | None = None

    def __enter__(self) -> Self:
        self._watched = WatchedScript(Script(self._name), self._log_dir)
        self._watched.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        watched, self._watched = self._watched, None
        if watched is not None:
            watched.finish(ScriptEnd(0 if error is None else 1, error))
