"""Runs scripts and modules in forked copies of a Python that has imported torch and Lightning already.

Its own script, started by ``commands.Warm`` with the name of a socket: a line of JSON is a command or asks for the end
of one, a line answers with its process or its exit code. It ends, with all that it has started, when the last of its
clients has gone. A copy is what ``python src/train.py ...`` is but for its imports: own
environment, folder, streams and exit code; its main module is the script, and it ends as Python ends. What is read when
a process starts or torch is imported (OMP_NUM_THREADS, PYTHONHASHSEED) is as in this process; of LD_LIBRARY_PATH the
NVIDIA driver alone is taken. Where the simulated cards are preloaded, a copy gets those that its FAKE_CUDA_* describe.
"""

import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
IMPORTED = (
    "jinja2",
    "transformers.models.gpt2.modeling_gpt2",
    "wandb",
    "wellfed.cli.commands.entry_scripts",
    "wellfed.run.stages",
    "wellfed.watch.torch_marks",
    "workloads.recsys.data",
    "workloads.recsys.model",
)
"""What a run imports, with all that these import."""
OF_TESTS = ("hypothesis", "pytest", "_pytest.assertion", "_pytest.python", "_pytest.skipping", "_pytest.tmpdir")
"""What a test on simulated cards imports beside that."""


def import_path(environ: dict[str, str]) -> list[str]:
    """PYTHONPATH as the interpreter reads it."""
    given = environ.get("PYTHONPATH", "")
    return [os.path.abspath(path) for path in given.split(os.pathsep)] if given else []


def unfit() -> str:
    """Why a copy of this process may not do what a new one does; empty if it may."""
    num_threads = len(os.listdir("/proc/self/task"))
    if num_threads > 1:  # they would be missing in a copy, with whatever locks they hold
        return f"{num_threads} threads run"
    files = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    if any(file.startswith("/dev/nvidia") for file in files):
        return "CUDA was started, and a copy can't use it"
    return ""


def become(request: dict[str, Any], paths: list[str]) -> None:
    """Make this process what the command's own would be when its script starts."""
    for descriptor, name, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, request["out"], os.O_WRONLY | os.O_CREAT),
        (2, request["err"], os.O_WRONLY | os.O_CREAT),
    ):
        opened = os.open(name, flags, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    tempfile.tempdir = None  # TMPDIR may be another
    for folder in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep):
        if os.path.exists(driver := os.path.join(folder, "libnvidia-ml.so.1")):
            ctypes.CDLL(driver)  # what has been loaded is found by its name from then on
            break
    if "fake_cuda" in sys.modules:  # PYTHONPATH has tests/fake_cuda/site
        sys.modules["fake_cuda"].install()
    sys.argv = request["argv"]
    first = os.getcwd() if sys.argv[0] == "-m" else os.path.dirname(sys.argv[0])
    sys.path[:] = [first, *import_path(request["environ"]), *paths]


def serve(name: str) -> None:
    """Answer clients until the last has gone; returns in a copy, when it has become a command."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # what a shell above the tests has left open
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind(f"\0{name}")
    except OSError:  # another process of the session was faster
        sys.exit()
    listening.listen(64)
    own = [os.path.abspath(os.path.dirname(__file__)), *import_path(dict(os.environ))]
    paths = [path for path in sys.path if os.path.abspath(path) not in own]
    sys.path[:0] = [str(ROOT / "src")]
    gc.disable()  # imports leave next to no garbage
    for module in (*IMPORTED, *(OF_TESTS if "FAKE_CUDA_LATER" in os.environ else ())):
        importlib.import_module(module)
    gc.enable()
    gc.freeze()  # or a copy would look through all of it, and so copy it, when it ends
    greeting = {"unfit": unfit()}
    clients: dict[socket.socket, Any] = {}
    while True:
        for ready in select.select([listening, *clients], [], [])[0]:
            if ready is listening:
                client, _ = listening.accept()
                lines, answer = clients.setdefault(client, client.makefile("rw")), greeting
            elif not (line := clients[ready].readline()):
                clients.pop(ready).close()
                ready.close()
                if not clients:
                    os.killpg(os.getpid(), signal.SIGKILL)
                continue
            else:
                lines, request = clients[ready], json.loads(line)
                if "code_of" in request:
                    ended, status = os.waitpid(request["code_of"], os.WNOHANG)
                    answer = {"code": os.waitstatus_to_exitcode(status) if ended else None}
                elif (child := os.fork()) == 0:
                    for opened in (listening, *clients, *clients.values()):
                        opened.close()
                    become(request, paths)
                    return
                else:
                    answer = {"process": child}
            lines.write(json.dumps(answer) + "\n")
            lines.flush()


if __name__ == "__main__":
    serve(sys.argv[1])
    if sys.argv[0] == "-m":
        runpy._run_module_as_main(sys.argv.pop(1))  # type: ignore[attr-defined]  # what ``python -m`` calls
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
