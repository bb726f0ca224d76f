"""Runs the project's commands the way a user types them."""

from __future__ import annotations

import atexit
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.fake_cuda.machine import SITE

ROOT = Path(__file__).parents[2]
FAST = ("workload.data.scale=0.02", "workload.model.encoder_layers=1", "telemetry.ceiling_steps=3")
"""A run of seconds: 380 users."""
TIMEOUT_S = 300
READ_LATE = {
    "PYTHONPATH",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "CUDA_VISIBLE_DEVICES",
    "FAKE_NVML_SCENARIO",
    "FAKE_NVML_REPORT",
    "PLANTED",
    "PLANTED_FOLDER",
    "PLANTED_TEXT",
}
"""Variables that can be set for a Python that runs already, as ``warm_start.py`` does; and FAKE_CUDA_*."""
PRELOADED = {"PYTHONPATH": str(SITE), "FAKE_CUDA_DEVICES": "1", "FAKE_CUDA_LATER": "1"}
"""The simulated cards' driver is there, and a copy gets its own cards."""


@dataclass(frozen=True)
class Done:
    """A finished command."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


def environment(**more: str) -> dict[str, str]:
    """One thread (the machine is shared with other tests), no login, wide tables."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB_", "HYDRA_"))}
    return {**kept, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "HOME": kept.get("HOME", "/"), **more}


def start(script: str | Path, *arguments: str, cwd: Path, **more: str) -> subprocess.Popen[str]:
    """Start a script, by its path below ``src/`` or a whole one, in a Python of its own."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / "src" / script), *arguments],
        cwd=cwd,
        env=environment(**more),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def start_warm(script: str | Path, *arguments: str, cwd: Path, **more: str) -> subprocess.Popen[str] | WarmProcess:
    """Start a script (as `start`) in a copy of a Python that has imported torch already, which spares 5 s.

    In a Python of its own where there can be no such copy, or ``more`` has variables that are read when it starts.
    """
    fresh_only = {name for name in more if name not in READ_LATE and not name.startswith("FAKE_CUDA_")}
    server = None if fresh_only else warm(simulated="FAKE_CUDA_DEVICES" in more)
    if server is None:
        return start(script, *arguments, cwd=cwd, **more)
    return server.start(script, *arguments, cwd=cwd, environ=environment(**more))


def run(
    script: str | Path, *arguments: str, cwd: Path, fresh: bool = False, timeout_s: float = TIMEOUT_S, **more: str
) -> Done:
    """Run a script (as `start`) to its end; ``fresh``: in a Python of its own in any case.

    Raises:
        subprocess.TimeoutExpired: it did not end in time; it is killed.
    """
    process = (start if fresh else start_warm)(script, *arguments, cwd=cwd, **more)
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        raise
    return Done(process.returncode, out, err)


class Warm:
    """``warm_start.py``, one a test session. What does not answer in time is ended, with all that it started."""

    def __init__(self, **more: str) -> None:
        self._streams = tempfile.mkdtemp(prefix="wellfed-streams-")
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("warm_start.py"))],
            env=environment(**more),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        self.unfit: str = self.ask(None)["unfit"]
        """Why a copy of it may not do what a new process does."""

    def start(self, script: str | Path, *arguments: str, cwd: Path, environ: Mapping[str, str]) -> WarmProcess:
        """Start one command."""
        folder = Path(tempfile.mkdtemp(dir=self._streams))
        out, err = folder / "out", folder / "err"
        argv = [str(ROOT / "src" / script), *arguments]
        answer = self.ask({"argv": argv, "cwd": str(cwd), "environ": environ, "out": str(out), "err": str(err)})
        return WarmProcess(self, answer["process"], out, err)

    def ask(self, request: Mapping[str, Any] | None, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        """Its answer; None asks nothing, and hears what it says first."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            if request is not None:
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
            if not select.select([self._process.stdout], [], [], timeout_s)[0]:
                raise subprocess.TimeoutExpired(self._process.args, timeout_s)
            return json.loads(self._process.stdout.readline())
        except BaseException:
            warm.cache_clear()  # the next command gets another
            self.close()
            raise

    def close(self) -> None:
        """End it and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.__exit__(None, None, None)
        shutil.rmtree(self._streams, ignore_errors=True)


class WarmProcess:
    """A command that was started by `Warm`; what the tests use of Popen."""

    def __init__(self, server: Warm, pid: int, out: Path, err: Path) -> None:
        self._server, self.pid, self._out, self._err = server, pid, out, err
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        return self._wait(is_blocking=False)

    def send_signal(self, signum: int) -> None:
        """Unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it wrote on stdout and stderr, when it has ended."""
        self._wait(is_blocking=True, timeout_s=timeout)
        return self._out.read_text(), self._err.read_text()

    def _wait(self, *, is_blocking: bool, timeout_s: float = TIMEOUT_S) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.ask({"wait_for": self.pid, "is_blocking": is_blocking}, timeout_s)["code"]
        return self.returncode


@cache
def warm(simulated: bool = False) -> Warm | None:
    """The session's, started when it is first needed; None where a copy can't do what a new process does.

    Args:
        simulated: copies get the simulated cards that their own variables describe.
    """
    if sys.platform != "linux":
        return None
    server = Warm(**PRELOADED) if simulated else Warm()
    atexit.register(server.close)
    return None if server.unfit else server


def train(*arguments: str, cwd: Path, fresh: bool = False, **more: str) -> Done:
    """``python src/train.py`` on a small embedded set."""
    return run("train.py", *FAST, *arguments, cwd=cwd, fresh=fresh, **more)


def run_folders(cwd: Path, workload: str = "recsys") -> list[Path]:
    """The run folders below a working directory, oldest first."""
    return sorted((cwd / "logs" / workload / "runs").glob("*"))


def only_folder(cwd: Path, workload: str = "recsys") -> Path:
    """The one run folder."""
    (folder,) = run_folders(cwd, workload)
    return folder


def record_of(folder: Path) -> Mapping[str, Any]:
    """``run.json`` as strict JSON."""
    return json.loads((folder / "run.json").read_text(), parse_constant=lambda name: 1 / 0)
