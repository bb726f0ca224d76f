"""Creates the folder of a run, exclusively, somewhere that can be written; and removes it where nothing was run."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from wellfed import record
from wellfed.errors import ConfigError


@dataclass(frozen=True)
class RunFolder:
    """Where a run writes."""

    path: Path
    is_new: bool
    """Created for this run: removed again if nothing was run."""
    warning: str | None = None
    entries_before: frozenset[str] = frozenset()
    """What the folder held already; stays whatever happens."""
    record_before: bytes | None = None
    """The record of the run that is resumed in it."""

    def undo(self) -> None:
        """Nothing was run: what this run wrote goes, the earlier record comes back."""
        if self.is_new:
            shutil.rmtree(self.path, ignore_errors=True)
            return
        for name in {entry.name for entry in self.path.iterdir()} - self.entries_before:
            place = self.path / name
            if place.is_dir() and not place.is_symlink():
                shutil.rmtree(place, ignore_errors=True)
            else:
                place.unlink(missing_ok=True)
        if self.record_before is not None:
            (self.path / record.FILE_NAME).write_bytes(self.record_before)


def create(log_dir: Path, workload: str) -> RunFolder:
    """A new ``<log_dir>/<workload>/runs/<YYYY-mm-dd_HH-MM-SS>_<4 hex>``; under the temporary directory if that can't
    be written.

    Raises:
        ConfigError: neither can be written.
    """
    runs = log_dir / workload / "runs"
    try:
        return RunFolder(_create_in(runs), is_new=True)
    except OSError as error:
        # Users are kept apart in a shared temporary directory.
        user = str(os.getuid()) if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
        fallback = Path(tempfile.gettempdir()) / f"wellfed-{user}" / workload / "runs"
        where, problem = f"paths.log_dir={log_dir}", f"can't be written ({error.strerror or error})"
        way_out = "Set paths.log_dir to a folder that can be written."
        try:
            path = _create_in(fallback)
        except OSError as second:
            problem += f", nor can {fallback} ({second.strerror or second})."
            raise ConfigError.of(where, problem, way_out) from second
        return RunFolder(path, is_new=True, warning=f"{where} {problem}; this run goes to {path}. {way_out}")


def open_given(path: Path, *, resume: bool) -> RunFolder:
    """The folder the user named (hydra.run.dir), the job's of a multirun, or the one to resume in.

    Raises:
        ConfigError: it holds another run already, or can't be created.
    """
    if resume:
        return _existing(path)
    if (path / record.FILE_NAME).exists():
        way_out = f"Name another folder, or go on with that run: resume={path}"
        raise ConfigError.of(f"hydra.run.dir={path}", "holds a run already.", way_out)
    is_new = not path.exists()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"can't be created: {error.strerror}."
        raise ConfigError.of(f"hydra.run.dir={path}", problem, "Name another folder.") from error
    return RunFolder(path, is_new=True) if is_new else _existing(path)


def _existing(path: Path) -> RunFolder:
    file = path / record.FILE_NAME
    before = file.read_bytes() if file.exists() else None
    entries = frozenset(entry.name for entry in path.iterdir())
    return RunFolder(path, is_new=False, entries_before=entries, record_before=before)


def _create_in(runs: Path) -> Path:
    runs.mkdir(parents=True, exist_ok=True)
    while True:
        path = runs / f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{secrets.token_hex(2)}"
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
