"""Creates the folder of a run, where it can be written, and removes it if nothing was run."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from wellfed.config.compose import Composed
from wellfed.config.schema import RunConfig
from wellfed.errors import ConfigError
from wellfed.record.entries import FILE_NAME, RunRecord
from wellfed.run.folder import lock

_RESERVE, _RESERVED_BYTES = ".reserve", 1 << 18


@dataclass
class RunFolder:
    """Folder that a run, or another rank of it, writes to."""

    path: Path
    is_new: bool
    """Created for this run, so removed if nothing was run."""
    stays: bool = False
    """The run has begun, so its files are kept."""
    is_resumed: bool = False
    """It holds the run that goes on, otherwise at most a user's other files."""

    def begun(self) -> RunFolder:
        """Returns the same folder, new only if it holds nothing now. The caller holds its lock.

        Raises:
            ConfigError: it holds another run already.
        """
        if not self.is_resumed and (self.path / FILE_NAME).exists():
            way_out = f"Name another folder, or go on with that run: resume={self.path}"
            raise ConfigError.of(f"hydra.run.dir={self.path}", "holds a run already.", way_out)
        return replace(self, is_new=self.is_new and lock.holds_nothing(self.path))

    def undo(self) -> None:
        """Removes the folder of a run that did not begin; of a user's own folder, only the record."""
        if self.is_new:
            shutil.rmtree(self.path, ignore_errors=True)
        elif not self.is_resumed:
            (self.path / FILE_NAME).unlink(missing_ok=True)


def reserve(folder: Path) -> None:
    """Reserves space for the record of a run that ends on a full disk."""
    (folder / _RESERVE).write_bytes(os.urandom(_RESERVED_BYTES))  # zeros may take no space


def write_first(composed: Composed[RunConfig], folder: Path, first: RunRecord) -> None:
    """Writes the first record, and reserves disk space for the last one."""
    try:
        composed.write_hydra_files(folder)
        first.write(folder)
        reserve(folder)
    except OSError as error:
        problem = f"nothing can be written to {folder}: {error.strerror}."
        raise ConfigError.of("paths.log_dir", problem, "Free space, or name a folder on another disk.") from error


def release(folder: Path) -> None:
    """Frees the space of `reserve`."""
    with suppress(OSError):
        (folder / _RESERVE).unlink(missing_ok=True)


def of_rank() -> RunFolder:
    """Makes the temporary folder of a rank other than 0."""
    return RunFolder(Path(tempfile.mkdtemp(prefix="wellfed-rank-")), is_new=True)


def keep_readings_of_node(folder: Path, folder_of_run: Path, node: int) -> None:
    """Moves the telemetry of another machine, which its first rank has written, beside the run's own."""
    with suppress(OSError):  # there is none, or the run's folder is not on this machine
        shutil.move(folder / "telemetry.csv", folder_of_run / f"telemetry.node{node}.csv")


def create(log_dir: Path, workload: str) -> RunFolder:
    """Creates ``<log_dir>/<workload>/runs/<YYYY-mm-dd_HH-MM-SS>_<4 hex>``.

    The last four digits are the fraction of the second, so names sort by creation.

    Raises:
        ConfigError: the folder can't be written.
    """
    try:
        return RunFolder(new_in(log_dir / workload / "runs"), is_new=True)
    except OSError as error:
        problem = f"can't be written ({error.strerror or error})."
        way_out = "Set paths.log_dir to a folder that can be written."
        raise ConfigError.of(f"paths.log_dir={log_dir}", problem, way_out) from error


def open_given(path: Path, *, resume: bool) -> RunFolder:
    """Opens the folder that the user named (hydra.run.dir), a multirun job's folder, or the one to resume in.

    Raises:
        ConfigError: it can't be created.
    """
    if resume:
        return RunFolder(path, is_new=False, is_resumed=True)
    is_new = not path.exists()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"can't be created: {error.strerror}."
        raise ConfigError.of(f"hydra.run.dir={path}", problem, "Name another folder.") from error
    return RunFolder(path, is_new)


def new_name() -> str:
    """Returns a name for a folder: the time, with the fraction of the second as four hexadecimal digits."""
    now = datetime.now()
    return f"{now:%Y-%m-%d_%H-%M-%S}_{now.microsecond * 0x10000 // 1_000_000:04x}"


def new_in(parent: Path) -> Path:
    """Makes a folder that no other process has, by `new_name`, and returns it.

    Raises:
        OSError: it can't be made.
    """
    parent.mkdir(parents=True, exist_ok=True)
    while True:
        path = parent / new_name()
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
