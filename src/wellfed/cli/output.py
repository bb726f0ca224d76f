"""Prints the output of a command, and fails the command if the output can't be written."""

from __future__ import annotations

from typing import Any

from wellfed.errors import NotShown
from wellfed.run.screen import Terminal


class Answer(Terminal):
    """A console for a command's output. A closed pipe (``| head``) is no failure."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Prints as rich does. Raises `NotShown` if the output can't be written, e.g. on a full disk."""
        super().print(*objects, **options)
        if self.failure is not None:
            raise NotShown(self.failure)
