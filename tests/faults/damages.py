"""Changes of files and run folders, as crashes, bad disks and other programs leave them."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

Change = Callable[[Path], object]
"""Changes a file, or a run folder."""


def of(name: str, change: Change) -> Change:
    """Returns a change of one file of a run folder."""
    return lambda run: change(run / name)


def last(change: Change) -> Change:
    """Returns a change of the latest checkpoint alone."""
    return of("checkpoints/last.ckpt", change)


def all_checkpoints(change: Change) -> Change:
    """Returns a change of every checkpoint."""

    def change_all(run: Path) -> None:
        for checkpoint in (run / "checkpoints").glob("*.ckpt"):
            change(checkpoint)

    return change_all


def both(*changes: Change) -> Change:
    """Returns a change that makes all of these."""

    def change_all(run: Path) -> None:
        for change in changes:
            change(run)

    return change_all


def changed(**values: object) -> Change:
    """Returns a change that sets these values in run.json."""

    def change(run: Path) -> None:
        found = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps(found | values))

    return change


def cut(path: Path) -> None:
    """Removes the second half."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def empty(path: Path) -> None:
    """Removes the content."""
    path.write_bytes(b"")


def noise(path: Path) -> None:
    """Replaces the content by 4 KiB of all byte values."""
    path.write_bytes(bytes(range(256)) * 16)


def zeros(path: Path) -> None:
    """Replaces the content by as many zero bytes, as file systems do that lose blocks in a crash."""
    path.write_bytes(bytes(path.stat().st_size))


def flipped(path: Path) -> None:
    """Flips one bit in the middle, which in a checkpoint is in the weights."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def flipped_in_directory(path: Path) -> None:
    """Flips one bit in a zip archive's list of members, which no checksum of a member covers."""
    content = bytearray(path.read_bytes())
    content[content.rindex(b"PK\x01\x02") + 42] ^= 4
    path.write_bytes(bytes(content))


def first_line(table: Path) -> None:
    """Overwrites the head of a table."""
    lines = table.read_text().splitlines(keepends=True)
    table.write_text("".join(["\x00garbage,,,\n", *lines[1:]]))


def torn(table: Path) -> None:
    """Appends a row that was cut off while it was written."""
    with table.open("a") as file:
        file.write("21,0.1,2,8")


def folder_instead(path: Path) -> None:
    """Puts a folder in the place of the file."""
    path.unlink(missing_ok=True)
    path.mkdir()


def pipe_instead(path: Path) -> None:
    """Puts a named pipe in the place of the file. Opening it would wait for a writer."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)


class _Code:
    """Creates the file ``ran`` in the working directory when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return open, ("ran", "w")


def code(path: Path) -> None:
    """Replaces the content by a pickle that runs code."""
    path.write_bytes(pickle.dumps({"state_dict": {}, "global_step": _Code()}))
