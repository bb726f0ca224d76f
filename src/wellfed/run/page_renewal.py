"""Renews the page of a run about once a minute while it runs, so that a browser can follow it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, Self

from wellfed import project
from wellfed.explain.report import renewal
from wellfed.explain.report.run_lines import RENEWED_EVERY_S
from wellfed.record import OnEvent

_LOG = logging.getLogger(__name__)
_LONGEST_S = 600.0
"""Seconds after which a renewal is given up, as on a file system that hangs."""
_POLL_S = 0.1
_STOP_S = 2.0
"""Seconds that the end of a run waits for a renewal in progress to give up."""
_LAST_BYTES = 4096
_LONGEST_PAUSE = 10
"""Pause after repeated failures, as a multiple of the usual one."""


class PageRenewal:
    """Starts a process for each renewal while the ``with`` block lasts. The training never waits for it.

    Threads of this process would take the interpreter's lock from the training loop. A process with the lowest priority
    takes only CPU time that is left. The first failure becomes an event; all later ones are in the log.
    """

    def __init__(self, folder: Path, on_event: OnEvent, *, every_s: float = RENEWED_EVERY_S) -> None:
        self._folder, self._on_event, self._every_s = folder, on_event, every_s
        self._stopping, self._has_failed = threading.Event(), False
        self._thread = threading.Thread(target=self._renew_until_the_end, name="wellfed-page", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(_STOP_S)

    def _renew_until_the_end(self) -> None:
        wait_s, num_failed = self._every_s, 0
        while not self._stopping.wait(wait_s):
            try:
                wait_s, num_failed = max(self._every_s, self._renewed()), 0
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                self._failed(str(error))
                wait_s, num_failed = min(2**num_failed, _LONGEST_PAUSE) * self._every_s, num_failed + 1

    def _renewed(self) -> float:
        """Starts a renewal, waits for its end, and returns the seconds until the next.

        Raises:
            OSError: the process could not be started.
            ValueError: it failed, or took too long.
        """
        with tempfile.TemporaryFile() as printed:  # forked workers would keep a pipe open
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", renewal.__name__, str(self._folder)],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                **_APART,
            )
            code = self._ended(process)
            printed.seek(max(0, printed.seek(0, os.SEEK_END) - _LAST_BYTES))
            lines = printed.read().decode("utf-8", "replace").split("\n")
        if self._stopping.is_set():
            return 0.0
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        if code != 0:
            raise ValueError(last or f"the process that draws it ended with exit code {code}")
        return float(last)

    def _ended(self, process: subprocess.Popen[bytes]) -> int:
        """Returns the exit code of the process, which the end of the run or `_LONGEST_S` cuts short."""
        for _ in range(round(_LONGEST_S / _POLL_S)):
            if self._stopping.wait(_POLL_S):
                break
            if (code := process.poll()) is not None:
                return code
        process.terminate()
        try:
            return process.wait(_STOP_S / 2)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait(_STOP_S / 2)

    def _failed(self, message: str) -> None:
        _LOG.info("The page could not be renewed: %s", message)
        if not self._has_failed:
            self._has_failed = True
            self._on_event("page_failed", message=message)


_APART: dict[str, Any] = {} if sys.platform == "win32" else {"process_group": 0}
"""Ctrl-C in the terminal reaches the training alone, which then ends the renewal."""


def _environment() -> dict[str, str]:
    """Returns the environment of a renewal: one thread, and the engine that this process runs."""
    found = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    if not project.is_engine_installed():
        searched = [str(project.ENGINE.parent), *filter(None, [found.get("PYTHONPATH")])]
        found["PYTHONPATH"] = os.pathsep.join(searched)
    return found
