"""Runs Python scripts in copies of a Python that has imported torch and Lightning, which takes seconds each time.

A copy is forked, gets arguments, variables and a file for what it prints, and runs the script as ``__main__``: to the
script it is a process of its own. With simulated cards the first Python loads their library, and each copy gets the
cards that its variables describe.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType


@dataclass(frozen=True)
class Ended:
    """Exit code and seconds of a copy."""

    code: int
    seconds: float


class WarmPython:
    """Python that has imported torch; a context manager.

    Args:
        variables: environment variables that it needs before torch is imported.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        command = [sys.executable, __file__]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env={**os.environ, **variables})

    def __enter__(self) -> WarmPython:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def run(
        self, arguments: Sequence[str], printed: Path, *, variables: Mapping[str, str], folder: Path, timeout_s: float
    ) -> Ended:
        """Runs a script and waits for it; it and all that it started are killed after ``timeout_s``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {
            "arguments": list(arguments),
            "printed": str(printed),
            "variables": dict(variables),
            "folder": str(folder),
            "timeout_s": timeout_s,
        }
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the Python that was to be copied has died")
        return Ended(**json.loads(answer))


def _serve() -> None:
    import lightning.pytorch  # noqa: F401
    import torch  # noqa: F401
    import torchmetrics  # noqa: F401

    import wellfed.config.entry
    import wellfed.process
    import wellfed.run.stages
    import wellfed.run.train  # noqa: F401

    answers = os.dup(1)
    os.dup2(2, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        began_s = time.monotonic()
        pid = os.fork()
        if pid == 0:
            os.close(answers)
            _be(asked)
        code = _wait(pid, asked["timeout_s"])
        ended = Ended(code, time.monotonic() - began_s)
        os.write(answers, (json.dumps(vars(ended)) + "\n").encode())


def _wait(pid: int, timeout_s: float) -> int:
    until_s = time.monotonic() + timeout_s
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until_s:
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.02)


def _be(asked: Mapping[str, object]) -> None:
    """Becomes the script, in the copy; never returns."""
    code: object = 1
    try:
        os.setsid()
        os.environ.update(asked["variables"])  # type: ignore[call-overload]
        os.chdir(str(asked["folder"]))
        printed = os.open(str(asked["printed"]), os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, target in ((nothing, 0), (printed, 1), (printed, 2)):
            os.dup2(number, target)
        if os.environ.get("FAKE_CUDA_LATER") == "1":
            import fake_cuda  # type: ignore[import-not-found]

            fake_cuda.install()
        sys.argv = list(asked["arguments"])  # type: ignore[call-overload]
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code
    except BaseException:  # noqa: BLE001  the copy must not go on as the server
        import traceback

        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


if __name__ == "__main__":
    _serve()
