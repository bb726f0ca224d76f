"""Reads the files of wandb runs back with wandb's own reader, also those of runs that were killed."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Stored:
    """Content of the file of a run."""

    entries: list[dict[str, Any]]
    """All records as ``{"num": ..., "type": <type>, <type>: {...}}``."""

    def of_type(self, kind: str) -> list[dict[str, Any]]:
        return [entry[kind] for entry in self.entries if entry["type"] == kind]

    @property
    def history(self) -> list[dict[str, Any]]:
        """Rows as they were logged, in order, without wandb's own keys; what is not a finite number is a string."""
        items = [entry["item"] for entry in self.of_type("history")]
        return [{key: value for key, value in item.items() if not key.startswith("_")} for item in items]

    def curve(self, axis: str, name: str) -> list[tuple[Any, Any]]:
        """``(axis, value)`` of the rows that hold both."""
        return [(row[axis], row[name]) for row in self.history if axis in row and name in row]

    @property
    def axes(self) -> dict[str, str]:
        """Metric that each pattern is drawn against."""
        found = self.of_type("metric")
        return {_name(entry): entry["step_metric"] for entry in found if "step_metric" in entry}

    @property
    def hidden(self) -> set[str]:
        """Metrics without a curve of their own."""
        return {_name(entry) for entry in self.of_type("metric") if entry["options"].get("hidden")}

    @property
    def exit_code(self) -> int | None:
        """None = the run was not finished."""
        found = self.of_type("exit")
        return found[0].get("exit_code", 0) if found else None


def stored(folder: Path) -> Stored:
    """The run in ``.../wandb/offline-run-...``."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Stored([json.loads(line) for line in done.stdout.splitlines()])


def _name(metric: dict[str, Any]) -> str:
    return metric.get("glob_name") or metric["name"]
