"""Runs the project's commands the way a user types them."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
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
    """Starts a script, by its path below ``src/`` or a whole one, in a Python of its own. ``-m`` starts a module."""
    return subprocess.Popen(
        [sys.executable, _typed(script), *arguments],
        cwd=cwd,
        env=environment(**more),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def _typed(script: str | Path) -> str:
    return "-m" if script == "-m" else str(ROOT / "src" / script)


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
    """A connection to ``warm_start.py``, which all processes of a test session share. It ends with its last client."""

    def __init__(self, kind: str, **more: str) -> None:
        self._streams = tempfile.mkdtemp(prefix="wellfed-streams-")
        session = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
        self._socket = _connected(f"wellfed-{session}-{kind}", environment(**more))
        self._lines = self._socket.makefile("rw")
        self.unfit: str = self._answer()["unfit"]
        """Why a copy of it may not do what a new process does."""

    def start(self, script: str | Path, *arguments: str, cwd: Path, environ: Mapping[str, str]) -> WarmProcess:
        """Start one command."""
        folder = Path(tempfile.mkdtemp(dir=self._streams))
        out, err = folder / "out", folder / "err"
        argv = [_typed(script), *arguments]
        answer = self.ask({"argv": argv, "cwd": str(cwd), "environ": environ, "out": str(out), "err": str(err)})
        return WarmProcess(self, answer["process"], out, err)

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Its answer."""
        self._lines.write(json.dumps(request) + "\n")
        self._lines.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        try:
            return json.loads(self._lines.readline())
        except BaseException:
            warm.cache_clear()  # the next command gets another
            self.close()
            raise

    def close(self) -> None:
        """Leave it."""
        self._lines.close()
        self._socket.close()
        shutil.rmtree(self._streams, ignore_errors=True)


def _connected(name: str, environ: Mapping[str, str]) -> socket.socket:
    """A connection to the server of that name, which is started if there is none."""
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(TIMEOUT_S)
    is_started, until_s = False, time.monotonic() + TIMEOUT_S
    while True:
        try:
            client.connect(f"\0{name}")  # without a file
            return client
        except ConnectionRefusedError:
            assert time.monotonic() < until_s, "no server answers"
            if not is_started:
                program = [sys.executable, str(Path(__file__).with_name("warm_start.py")), name]
                nothing = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
                output = (os.POSIX_SPAWN_DUP2, 2, 1)  # what an import prints is of no test
                os.posix_spawn(sys.executable, program, environ, file_actions=[nothing, output], setsid=True)
            is_started = True
            time.sleep(0.02)


class WarmProcess:
    """A command that was started by `Warm`; what the tests use of Popen."""

    def __init__(self, server: Warm, pid: int, out: Path, err: Path) -> None:
        self._server, self.pid, self._out, self._err = server, pid, out, err
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        if self.returncode is None:
            self.returncode = self._server.ask({"code_of": self.pid})["code"]
        return self.returncode

    def send_signal(self, signum: int) -> None:
        """Unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it wrote on stdout and stderr, when it has ended."""
        until_s, pause_s = time.monotonic() + timeout, 0.002
        while self.poll() is None:
            if time.monotonic() > until_s:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(pause_s)
            pause_s = min(0.05, 1.2 * pause_s)
        return self._out.read_text(), self._err.read_text()


@cache
def warm(simulated: bool = False) -> Warm | None:
    """That of this process, connected when it is first needed; None where a copy can't do what a new process does.

    Args:
        simulated: copies get the simulated cards that their own variables describe.
    """
    if sys.platform != "linux":
        return None
    server = Warm("simulated", **PRELOADED) if simulated else Warm("plain")
    atexit.register(server.close)
    return None if server.unfit else server


def train(*arguments: str, cwd: Path, fresh: bool = False, **more: str) -> Done:
    """``python src/train.py`` on a small embedded set."""
    return run("train.py", *FAST, *arguments, cwd=cwd, fresh=fresh, **more)


def train_own(
    user: Path,
    workload: str,
    *arguments: str,
    cwd: Path | None = None,
    ceiling_steps: int = 3,
    **more: str,
) -> Done:
    """The same for a workload of a user's own, whose module and ``configs/`` lie in one folder."""
    own = ("--config-dir", str(user / "configs"), f"workload={workload}")
    paths = [str(user), *filter(None, [more.pop("PYTHONPATH", "")])]
    quick = ("logger=none", f"telemetry.ceiling_steps={ceiling_steps}")
    (cwd or user).mkdir(exist_ok=True)
    return run("train.py", *own, *quick, *arguments, cwd=cwd or user, PYTHONPATH=os.pathsep.join(paths), **more)


def weights_of(folder: Path, name: str = "last.ckpt") -> dict[str, Any]:
    """The weights in a checkpoint of a run."""
    import torch

    return torch.load(folder / "checkpoints" / name, map_location="cpu", weights_only=True)["state_dict"]


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
