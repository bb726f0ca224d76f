"""Says what takes figures beside the files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Sink:
    """Takes rows of figures from several threads, beside the files; this one drops them.

    None raises for its own troubles.
    """

    def log(self, row: Mapping[str, float | int | None]) -> None:
        """One row; it carries its own axis (``step`` or ``telemetry/time_s``) among its keys."""

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """No more rows count: one that a thread still hands over is dropped."""
