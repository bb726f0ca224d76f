"""A pseudo-terminal that runs a command, for tests of what users see."""

import codecs
import os
import re
import select
import struct
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

has_terminals = pytest.mark.skipif(sys.platform != "linux", reason="needs setsid and a pseudo-terminal of Linux")


class SmallTerminal:
    """A terminal that runs a command, and the text on it."""

    def __init__(self, command: list[str], environ: dict[str, str], columns: int = 80, lines: int = 24) -> None:
        import fcntl  # not on Windows
        import pty
        import termios

        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.sent, self._decoder = "", codecs.getincrementaldecoder("utf-8")()
        self.process = subprocess.Popen(
            ["setsid", "--ctty", "--wait", *command], env=environ, stdin=theirs, stdout=theirs, stderr=theirs
        )
        os.close(theirs)

    def until(self, condition: Callable[[str], object], timeout_s: float = 30.0) -> None:
        """Reads until the condition holds for the output, or the output ends."""
        give_up_at_s = time.monotonic() + timeout_s
        while not condition(self.sent):
            left_s = give_up_at_s - time.monotonic()
            assert left_s > 0, self.sent
            if select.select([self._ours], [], [], left_s)[0] and not self._read():
                return

    def type(self, keys: str) -> None:
        """Types keys."""
        os.write(self._ours, keys.encode())

    def end(self, timeout_s: float = 30.0) -> int:
        """Reads the rest and returns the exit code."""
        self.until(lambda sent: False, timeout_s)
        os.close(self._ours)
        return self.process.wait(timeout=20)

    def screen(self) -> list[str]:
        """Returns the lines, also those that have scrolled away."""
        lines, row, column = [""], 0, 0
        sent = re.sub(r"\x1b\]8;[^\x1b]*\x1b\\", "", self.sent)  # links
        for code, text in re.findall(r"(\x1b\[[0-9;?]*[A-Za-z]|\r|\n)|([^\x1b\r\n]+)", sent):
            if code == "\r":
                column = 0
            elif code == "\n":
                row, lines = row + 1, lines + [""] * (row + 2 - len(lines))
            elif code == "\x1b[1A":
                row -= 1
            elif code == "\x1b[2K":
                lines[row] = ""
            elif code == "\x1b[K":
                lines[row] = lines[row][:column]
            elif text:
                lines[row] = lines[row].ljust(column)[:column] + text + lines[row][column + len(text) :]
                column += len(text)
        return [line.rstrip() for line in lines]

    def _read(self) -> bool:
        try:
            part = os.read(self._ours, 65536)
        except OSError:  # how Linux says that the other end is closed
            return False
        self.sent += self._decoder.decode(part)  # a read may end within a character
        return bool(part)
