"""Simulates a power cut: all files become what a file system has kept that drops everything that was not flushed."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar


class Durable:
    """A record of what a crash of the machine leaves: content flushed by ``os.fsync``, and names in flushed folders.

    `cut_power` puts all files below ``logs/`` into that state and kills the process. Two file systems are simulated:
    names survive and unflushed content does not (ext4 and XFS without their heuristics for renames), or names are
    lost as well unless their folder was flushed after (the least that POSIX promises). What existed when recording
    began counts as flushed, and so does the existence of folders.
    """

    content: ClassVar[dict[object, bytes]] = {}
    """Flushed content by inode."""
    names: ClassVar[dict[str, dict[str, object]]] = {}
    """Flushed entries by folder: name -> inode."""
    _fsync, _replace, _unlink = os.fsync, os.replace, os.unlink
    _gone = 0
    _on_rename: Callable[[str], object] = staticmethod(lambda name: None)

    @classmethod
    def record(cls, on_rename: Callable[[str], object] = lambda name: None) -> None:
        """Records every flush and rename from now on; calls ``on_rename`` with the new name before each rename."""
        cls._on_rename = staticmethod(on_rename)
        for folder, _, files in os.walk("logs"):
            for name in files:
                path = Path(folder, name)
                cls.content[path.stat().st_ino] = path.read_bytes()
            cls._flush_folder(folder)
        os.fsync, os.replace, os.unlink = cls.fsync, cls.replace, cls.unlink

    @classmethod
    def fsync(cls, file: Any) -> None:
        """Flushes as ``os.fsync``."""
        descriptor = file if isinstance(file, int) else file.fileno()
        cls._fsync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_dir():
            cls._flush_folder(str(path))
        elif path.is_file():
            cls.content[path.stat().st_ino] = path.read_bytes()

    @classmethod
    def replace(cls, source: Any, target: Any, **more: Any) -> None:
        """Renames as ``os.replace``."""
        cls._on_rename(Path(target).name)
        cls._forget(target)
        cls._replace(source, target, **more)

    @classmethod
    def unlink(cls, path: Any, **more: Any) -> None:
        """Removes as ``os.unlink``."""
        if "dir_fd" not in more:
            cls._forget(path)
        cls._unlink(path, **more)

    @classmethod
    def _flush_folder(cls, folder: str) -> None:
        found = {entry.name: entry.inode() for entry in os.scandir(folder) if entry.is_file()}
        cls.names[os.path.realpath(folder)] = dict(found)

    @classmethod
    def _forget(cls, path: Any) -> None:
        """Gives the flushed content of a file that goes another key, since its inode may be used again."""
        try:
            inode = os.stat(path).st_ino
        except OSError:
            return
        cls._gone += 1
        if inode in cls.content:
            cls.content[("gone", cls._gone)] = cls.content.pop(inode)
        for entries in cls.names.values():
            for name, held in entries.items():
                if held == inode:
                    entries[name] = ("gone", cls._gone)

    @classmethod
    def cut_power(cls, *, keeps_names: bool) -> None:
        """Leaves the files of a machine that lost its power now, and kills this process."""
        folders = [folder for folder, _, _ in os.walk("logs")]
        for folder in folders:
            there = {entry.name: entry.inode() for entry in os.scandir(folder) if entry.is_file()}
            kept: dict[str, object] = dict(there) if keeps_names else cls.names.get(os.path.realpath(folder), {})
            for name in there.keys() - kept.keys():
                cls._unlink(Path(folder, name))
            for name, inode in kept.items():
                path = Path(folder, name)
                if path.exists():
                    cls._unlink(path)
                path.write_bytes(cls.content.get(inode, b""))
        os.kill(os.getpid(), signal.SIGKILL)
