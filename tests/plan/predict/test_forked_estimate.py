import os
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from tests.kit.footprints import footprint
from wellfed.plan.predict import forked_estimate as subject
from wellfed.plan.predict.forked_estimate import in_fork
from wellfed.plan.predict.peak import NoEstimate

FOUND = footprint()


@pytest.fixture(params=["child", "in process"])
def either(request, monkeypatch):
    """With a child process, and where there can be none."""
    monkeypatch.setattr(subject, "MAY_FORK", request.param == "child")


@pytest.mark.parametrize("found", [FOUND, NoEstimate("it asks for values")])
def test_it_finds_what_was_found(either, found):
    assert in_fork(lambda: found) == found


def test_nothing_is_drawn(either):
    def draw():
        random.random()
        np.random.rand()
        torch.rand(1)
        return FOUND

    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert in_fork(draw) == FOUND
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


def test_what_is_kept_stays_in_the_child():
    kept = {}
    in_fork(lambda: kept.update(tensor=torch.ones(1)) or FOUND)
    assert kept == {}


def test_what_ends_the_process_is_a_reason(either):
    assert in_fork(lambda: sys.exit(3)).reason == "the rehearsal of a step ended with exit code 3"
    assert in_fork(lambda: sys.exit("why")).reason.endswith("exit code 1")
    assert in_fork(sys.exit).reason.endswith("exit code 0")


def test_an_error_without_a_text_is_a_reason():
    class Wordless(Exception):
        def __str__(self):
            raise TypeError("it has no words")

    def fail():
        raise Wordless

    assert in_fork(fail).reason == "Wordless: "


def test_a_crash_is_a_reason():
    found = in_fork(lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert found.reason == "the rehearsal of a step ended with signal 9 (SIGKILL)"


def test_an_error_is_a_reason():
    def fail():
        raise RuntimeError("no\nway")

    assert in_fork(fail) == NoEstimate("RuntimeError: no")


@pytest.mark.slow
def test_what_is_printed_is_not_on_stdout():
    script = """
import os, atexit
from tests.kit.footprints import footprint
from wellfed.plan.predict.forked_estimate import in_fork
print("before")
atexit.register(print, "the end")
in_fork(lambda: print("inside") or os.system("echo beneath") or footprint())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["before", "the", "end"]
    assert sorted(done.stderr.split()) == ["beneath", "inside"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_interrupts_this_process_ends_the_child(number, tmp_path):
    class Stop(BaseException):
        pass

    def stop(signum, frame):
        raise Stop

    file = tmp_path / "pid"

    def wait():
        file.write_text(str(os.getpid()))
        time.sleep(60)
        return FOUND

    def interrupt():
        while not (file.exists() and file.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    before = signal.signal(number, stop)
    waiting = threading.Thread(target=interrupt)
    waiting.start()
    try:
        with pytest.raises(Stop):
            in_fork(wait)
    finally:
        waiting.join()
        signal.signal(number, before)
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)


def test_a_signal_to_the_child_runs_nothing_of_this_process():
    before = signal.signal(signal.SIGTERM, lambda *given: os._exit(7))
    try:
        assert in_fork(lambda: os.kill(os.getpid(), signal.SIGTERM)).reason.endswith("signal 15 (SIGTERM)")
    finally:
        signal.signal(signal.SIGTERM, before)


def test_no_pipe_and_no_mask_is_left():
    before = len(os.listdir("/proc/self/fd")), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    for work in (lambda: FOUND, sys.exit):
        in_fork(work)
    assert (len(os.listdir("/proc/self/fd")), signal.pthread_sigmask(signal.SIG_BLOCK, ())) == before


def test_where_there_is_no_room_for_a_child_it_is_done_here(monkeypatch):
    def refuse():
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(os, "fork", refuse)
    kept = {}
    assert in_fork(lambda: kept.update(here=True) or FOUND) == FOUND
    assert kept == {"here": True}


def test_where_autograd_does_not_work_in_a_child_it_is_done_here(monkeypatch):
    here = os.getpid()
    backward = torch.Tensor.backward

    def refuse(tensor, *args, **more):
        if os.getpid() != here:
            raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing.")
        return backward(tensor, *args, **more)

    monkeypatch.setattr(torch.Tensor, "backward", refuse)
    kept = {}
    assert in_fork(lambda: kept.update(here=True) or FOUND) == FOUND
    assert kept == {"here": True}


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors")
def test_a_process_with_thousands_of_open_files_is_answered():
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2000:
        pytest.skip(f"at most {hard} files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert in_fork(lambda: FOUND) == FOUND
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
