"""Prints the answer of a command, which has failed where the answer can't be written."""

from __future__ import annotations

from typing import Any

from wellfed.errors import NotShown
from wellfed.run.screen import Terminal


class Answer(Terminal):
    """A console whose output is all that is wanted; a reader that goes away (``| head``) has had enough."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Prints as rich does. Raises `NotShown` if the output can't be written, as on a full disk."""
        super().print(*objects, **options)
        if self.failure is not None:
            raise NotShown(self.failure)
