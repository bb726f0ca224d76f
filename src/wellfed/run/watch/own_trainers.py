"""Watches a training from within its code: a loop of Accelerate or of one's own, a function of Ray Train."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from wellfed.run.watch.script_process import Script, ScriptEnd
from wellfed.run.watch.watched_script import WatchedScript


def own_name() -> str:
    """Returns the name of the running script."""
    return Path(sys.argv[0]).name or "training"


class AccelerateWatch:
    """Watch of the training within a ``with`` block: ``with AccelerateWatch():`` around the loop.

    The first process leaves a run folder, and shows the last screen on stderr. Other ranks of torchrun bring it their
    figures. For a loop that Accelerate, or no library at all, has prepared. Within another watch it does nothing.
    """

    def __init__(self, name: str | None = None, log_dir: str | Path = "logs") -> None:
        """
        Args:
            name: name of the training in its report; None = the script's.
            log_dir: folder in which ``watch/runs/`` has the run folders.
        """
        self._name, self._log_dir = name or own_name(), Path(log_dir)
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


class RayTrainWatch:
    """A training function of Ray Train, watched on its first worker: ``TorchTrainer(RayTrainWatch(train_loop))``."""

    def __init__(self, train_loop: Callable[..., Any], name: str | None = None, log_dir: str | Path = "logs") -> None:
        """
        Args:
            train_loop: function that Ray calls on each worker.
            name: name of the training in its report; None = the function's.
            log_dir: folder on the worker, best on a disk that all machines share; relative to the driver's folder.
        """
        self._train_loop, self._name = train_loop, name or getattr(train_loop, "__name__", "training")
        self._log_dir = Path(log_dir).absolute()
        functools.update_wrapper(self, train_loop)  # Ray looks at the function's parameters

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Runs the function within a watch."""
        with AccelerateWatch(self._name, self._log_dir):
            return self._train_loop(*arguments, **named)
