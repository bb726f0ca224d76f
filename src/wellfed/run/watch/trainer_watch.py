"""Watches a Trainer of transformers: ``Trainer(..., callbacks=[TrainerWatch()])``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wellfed.extras import absence, is_installed
from wellfed.run.watch.own_trainers import own_name
from wellfed.run.watch.script_process import Script, ScriptEnd
from wellfed.run.watch.watched_script import WatchedScript


def _base() -> type:
    """Returns the base class of callbacks; without transformers the name can be imported, and not used."""
    if not is_installed("transformers"):
        return object
    from transformers import TrainerCallback

    return TrainerCallback  # type: ignore[no-any-return]


class TrainerWatch(_base()):  # type: ignore[misc]
    """Callback that watches each training of a Trainer. Leaves a run folder, and shows the last screen on stderr."""

    def __init__(self, name: str | None = None, log_dir: str | Path = "logs") -> None:
        """
        Args:
            name: name of the training in its report; None = the script's.
            log_dir: folder in which ``watch/runs/`` has the run folders.
        """
        if not is_installed("transformers"):
            raise ModuleNotFoundError(f"TrainerWatch {' '.join(absence('transformers'))}")
        self._name, self._log_dir = name or own_name(), Path(log_dir)
        self._watch: WatchedScript | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """Begins the watch; ends one whose training has failed, for which transformers calls nothing."""
        self._watch = WatchedScript(Script(self._name), self._log_dir, is_replaced=True)
        self._watch.start()

    def on_train_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """Ends the watch."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.finish(ScriptEnd(0))
