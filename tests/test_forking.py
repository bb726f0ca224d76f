"""Forked processes: how they leave, and that they don't outlive their parent."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import wellfed
from wellfed.process import MAY_FORK, exit_code

pytestmark = pytest.mark.skipif(not MAY_FORK, reason="forks")
SOURCE = {**os.environ, "PYTHONPATH": str(Path(wellfed.__file__).parents[1]), "PYTHONUNBUFFERED": ""}


def python(code: str) -> subprocess.CompletedProcess[str]:
    head = "import atexit, os, sys, time\nfrom wellfed.process import *\n"
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", head + code], env=SOURCE, capture_output=True, text=True
    )


def test_what_is_printed_is_written_once() -> None:
    done = python("""
print("before")
sys.stderr.write("warned")
pid = fork()
if pid == 0:
    print("child")
    leave(3)
print("code", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
""")
    assert (done.stdout, done.stderr, done.returncode) == ("before\nchild\ncode 3\n", "warned", 0)


def test_the_parents_last_duties_are_done_once() -> None:
    done = python("""
atexit.register(print, "last duty")
try:
    if (pid := fork()) == 0:
        leave(0)
    os.waitpid(pid, 0)
finally:
    print("finally")
""")
    assert done.stdout == "finally\nlast duty\n"


def test_a_signal_that_a_child_gets_before_it_has_its_handlers_waits_for_them() -> None:
    done = python("""
import signal
def stop(signum, frame):
    raise SystemExit(f"stopped by {signum}")
signal.signal(signal.SIGTERM, stop)
with held_signals() as let_through:
    pid = fork()
    if pid == 0:
        time.sleep(.1)
        end_by_signals()
        let_through()
        leave(4)
    os.kill(pid, signal.SIGTERM)
print("code", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
""")
    assert (done.stdout, done.stderr) == ("code -15\n", "")


def test_a_thread_beside_is_no_warning() -> None:
    done = python("""
import threading
threading.Thread(target=time.sleep, args=(1,), daemon=True).start()
if (pid := fork()) == 0:
    leave(0)
os.waitpid(pid, 0)
""")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("stream", ["None", "open(os.devnull, 'w')"])
def test_streams_that_are_gone_are_no_error(stream: str) -> None:
    done = python(f"sys.stdout = {stream}\nif sys.stdout: sys.stdout.close()\nflush()\nleave(4)")
    assert (done.returncode, done.stderr) == (4, "")


@pytest.mark.parametrize("given", ["None", "0", "7", "256 + 7", "-1", "True", "'words'", "''", "2.5", "[]"])
def test_the_exit_code_is_pythons_own(given: str) -> None:
    done = python(f"sys.exit({given})")
    assert exit_code(SystemExit(eval(given))) == done.returncode


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells a child")
@pytest.mark.parametrize("is_gone_before", [False, True])
def test_a_child_ends_with_its_parent(is_gone_before: bool) -> None:
    done = python(f"""
reading, writing = os.pipe()
parent = os.getpid()
pid = fork()
if pid == 0:
    while {is_gone_before} and os.getppid() == parent:
        time.sleep(0.01)
    die_with_parent(parent)
    os.write(writing, b"x")
    time.sleep(600)
    leave(0)
if not {is_gone_before}:
    os.read(reading, 1)
os.write(1, str(pid).encode())
os.kill(parent, 9)
""")  # returns when the last has let go of its standard output
    assert done.returncode == -9
    end_s = time.monotonic() + 30
    while psutil.pid_exists(int(done.stdout)) and psutil.Process(int(done.stdout)).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end_s
        time.sleep(0.01)
