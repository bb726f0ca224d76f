"""Stems and their jobs, with real forks: what comes back, and that no process stays behind."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

import wellfed
from wellfed.errors import ConfigError, DataError, Fault
from wellfed.forking import MAY_FORK
from wellfed.sweep.output import last_lines
from wellfed.trials.fork_server import Ended, Job, Stem, StemFailed

pytestmark = pytest.mark.skipif(not MAY_FORK, reason="forks")
LONG_S = 60
SOURCE = {**os.environ, "PYTHONPATH": str(Path(wellfed.__file__).parents[1]), "PYTHONUNBUFFERED": ""}


def until(is_so: Callable[[], Any], limit_s: float = 30) -> None:
    """Wait for what another process does."""
    end_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def crash() -> int:
    """As native code does; without what pytest would print."""
    faulthandler.disable()
    return len(ctypes.string_at(0))


def number_in(path: Path) -> int:
    """That another process writes there."""
    until(lambda: path.exists() and path.read_text().endswith("\n"))
    return int(path.read_text())


class Stems:
    """Makes stems whose work is ``work(prepared, task)``; runs jobs in them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.made, self.numbers = folder, [], 0

    def __call__(self, work: Callable[[Any, Any], int] = lambda prepared, task: 0, prepare: Any = lambda: None) -> Stem:
        stem = Stem(prepare, work, self.folder / f"stem{len(self.made)}.log")
        self.made.append(stem)
        return stem

    def ready(self, work: Callable[[Any, Any], int], prepare: Any = lambda: None) -> Stem:
        stem = self(work, prepare)
        stem.wait_ready(LONG_S)
        return stem

    def job(self, task: Any = None, **more: Any) -> Job:
        self.numbers += 1
        folder = self.folder / f"job{self.numbers}"
        folder.mkdir()
        return Job(folder.name, folder, task, **more)

    def run(self, work: Callable[[Any, Any], int], task: Any = None, **more: Any) -> tuple[Ended, str, str]:
        """One job's end, and what it printed."""
        stem, job = self.ready(work), self.job(task, **more)
        stem.start(job)
        ended = stem.take()
        assert ended.key == job.key
        return ended, *((job.folder / name).read_text() for name in ("stdout.txt", "stderr.txt"))


@pytest.fixture
def stems(tmp_path: Path) -> Iterator[Stems]:
    """Closed at the end, and then no process is left."""
    before = set(psutil.Process().children(recursive=True))
    made = Stems(tmp_path)
    yield made
    for stem in made.made:
        stem.close()
    assert set(psutil.Process().children(recursive=True)) <= before


def test_what_a_job_and_its_children_print_goes_to_its_folder(stems: Stems, capfd: pytest.CaptureFixture[str]) -> None:
    def work(prepared: Any, task: Any) -> int:
        print("said ü")
        print("wrong", file=sys.stderr)
        subprocess.run(["sh", "-c", "echo child; echo child wrong >&2; cat"], check=True)
        return 0

    ended, out, err = stems.run(work)
    assert (ended.code, out, err) == (0, "said ü\nchild\n", "wrong\nchild wrong\n")
    assert capfd.readouterr() == ("", "")


def test_what_the_parent_has_not_written_yet_is_not_written_twice(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from wellfed.trials.fork_server import Job, Stem
print("before", end=" ")
sys.stderr.write("warned ")
stem = Stem(lambda: print("prepared"), lambda prepared, task: print("worked"), Path("log"))
stem.wait_ready(60)
stem.start(Job("a", Path(".")))
stem.take()
stem.close()
print("after")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=SOURCE, capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("before after\n", "warned ", 0)
    assert (tmp_path / "log").read_text() == "prepared\n"
    assert (tmp_path / "stdout.txt").read_text() == "worked\n"


def test_a_job_has_its_environment_and_its_processors(stems: Stems) -> None:
    cpu = min(os.sched_getaffinity(0))

    def work(prepared: Any, task: Any) -> int:
        print(os.environ["CUDA_VISIBLE_DEVICES"], sorted(os.sched_getaffinity(0)))
        return 0

    _, out, _ = stems.run(work, environment={"CUDA_VISIBLE_DEVICES": "GPU-7"}, cpus=frozenset({cpu}))
    assert out == f"GPU-7 [{cpu}]\n"
    assert os.environ.get("CUDA_VISIBLE_DEVICES") != "GPU-7"


@pytest.mark.parametrize("code", [0, 1, 3, 130, 255])
def test_the_exit_code_is_what_the_work_gives(stems: Stems, code: int) -> None:
    assert stems.run(lambda prepared, task: task, code)[0].code == code


@pytest.mark.parametrize(("given", "code"), [(None, 0), (7, 7), ("words", 1)])
def test_one_that_calls_exit_ends_with_that(stems: Stems, given: object, code: int) -> None:
    assert stems.run(lambda prepared, task: sys.exit(task), given)[0].code == code


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGABRT])
def test_a_signal_is_told_as_a_negative_code(stems: Stems, number: signal.Signals) -> None:
    def work(prepared: Any, task: int) -> int:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), task)
        time.sleep(LONG_S)
        return 0

    assert stems.run(work, int(number))[0].code == -number


def test_a_crash_is_told_and_the_next_job_runs(stems: Stems) -> None:
    stem = stems.ready(lambda prepared, task: crash() if task == "crash" else 5)
    codes = []
    for task in ("crash", "go on"):
        stem.start(stems.job(task))
        codes.append(stem.take().code)
    assert codes == [-signal.SIGSEGV, 5]


@pytest.mark.parametrize("error", [ValueError("odd value"), KeyboardInterrupt()])
def test_an_exception_leaves_its_traceback(stems: Stems, error: BaseException) -> None:
    def work(prepared: Any, task: BaseException) -> int:
        raise task

    ended, _, err = stems.run(work, error)
    assert ended.code == 1
    assert err.startswith("Traceback (most recent call last):")
    assert err.rstrip().endswith(str(error) or "KeyboardInterrupt")


def test_what_is_prepared_is_prepared_once_and_changes_in_a_job_stay_there(stems: Stems) -> None:
    def work(prepared: list[int], task: Any) -> int:
        prepared.append(1)
        return len(prepared)

    stem = stems.ready(work, lambda: print("preparing") or [])
    codes = []
    for _ in range(3):
        stem.start(stems.job())
        codes.append(stem.take().code)
    assert codes == [1, 1, 1]
    assert (stems.folder / "stem0.log").read_text() == "preparing\n"


def test_jobs_run_at_the_same_time_and_each_is_told_when_it_ends(stems: Stems) -> None:
    def work(prepared: Any, task: tuple[str, str]) -> int:
        """Ends after another that was started later."""
        mine, awaited = (stems.folder / name for name in task)
        mine.touch()
        until(awaited.exists)
        return 0

    stem = stems.ready(work)
    jobs = [stems.job(task) for task in (("a", "end"), ("b", "a"), ("c", "b"))]
    for job in jobs:
        stem.start(job)
    assert {stem.take().key for _ in range(2)} == {jobs[1].key, jobs[2].key}
    (stems.folder / "end").touch()
    ended = stem.take()
    assert ended.key == jobs[0].key
    assert ended.seconds > 0


def grandchild(prepared: Any, task: str) -> int:
    """Starts a process that writes its number and would live on; then waits, or ends."""
    script = "echo $$ > pid.new; mv pid.new pid; exec sleep 600"
    subprocess.Popen(["sh", "-c", script], cwd=task.partition(":")[0])
    until((Path(task.partition(":")[0]) / "pid").exists)
    if task.endswith(":stay"):
        time.sleep(600)
    return 0


def test_what_is_killed_takes_along_what_it_has_started_and_leaves_its_neighbour(stems: Stems) -> None:
    stem = stems.ready(grandchild)
    (stems.folder / "one").mkdir()
    (stems.folder / "other").mkdir()
    one, other = (stems.job(f"{stems.folder / name}:stay") for name in ("one", "other"))
    stem.start(one)
    stem.start(other)
    killed, spared = (number_in(stems.folder / name / "pid") for name in ("one", "other"))
    stem.kill(one.key)
    ended = stem.take()
    assert (ended.key, ended.code) == (one.key, -signal.SIGKILL)
    until(lambda: is_gone(killed))
    assert not is_gone(spared)
    stem.close()
    until(lambda: is_gone(spared))


def test_what_a_job_leaves_behind_ends_with_it(stems: Stems) -> None:
    assert stems.run(grandchild, str(stems.folder))[0].code == 0
    until(lambda: is_gone(number_in(stems.folder / "pid")))


def test_killing_what_has_ended_does_nothing(stems: Stems) -> None:
    stem = stems.ready(lambda prepared, task: 0)
    job = stems.job()
    stem.start(job)
    stem.take()
    stem.kill(job.key)
    stem.kill("nobody")
    stem.start(stems.job())
    assert stem.take().code == 0


def fail(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("prepare", "problem", "status"),
    [
        (partial(fail, ValueError("odd value")), "ValueError: odd value", "failed"),
        (partial(fail, DataError("x.csv: line 3 is cut.")), "x.csv: line 3 is cut.", "failed"),
        (
            partial(fail, ConfigError([Fault("a", "is 1.", "Set 2."), Fault("b", "is 3.", "")])),
            "a: is 1. Set 2. b: is 3.",
            "invalid",
        ),
        (partial(fail, SystemExit(4)), "SystemExit: 4", "failed"),
        (partial(os._exit, 4), "the process that holds data and model has died", "failed"),
        (crash, "the process that holds data and model has died", "failed"),
        (partial(fail, KeyboardInterrupt()), "has died (KeyboardInterrupt)", "failed"),
    ],
    ids=["raises", "bad data", "bad configuration", "exits", "leaves", "crashes", "interrupted"],
)
def test_what_can_not_be_prepared_is_told(stems: Stems, prepare: Any, problem: str, status: str) -> None:
    stem = stems(prepare=prepare)
    with pytest.raises(StemFailed) as caught:
        stem.wait_ready(LONG_S)
    assert problem in str(caught.value)
    assert caught.value.status == status


def test_preparing_that_takes_too_long_is_told_and_ended(stems: Stems) -> None:
    stem = stems(prepare=lambda: time.sleep(LONG_S))
    with pytest.raises(StemFailed, match="were not there after 0.2 s; see .*stem0.log") as caught:
        stem.wait_ready(0.2)
    assert caught.value.status == "timeout"


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_stem_that_is_killed_is_told_and_its_jobs_die(stems: Stems, is_busy: bool) -> None:
    def work(pid: int, task: str) -> int:
        Path(task).write_text(f"{os.getpid()}\n")
        time.sleep(600)
        return 0

    stem = stems.ready(work, lambda: print(os.getpid()))
    pid = number_in(stems.folder / "stem0.log")
    if is_busy:
        stem.start(stems.job(str(stems.folder / "pid")))
        job = number_in(stems.folder / "pid")
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(StemFailed, match="the process that holds data and model has died"):
        stem.take()
    if is_busy:
        until(lambda: is_gone(job))
    with pytest.raises(StemFailed, match="has died"):
        stem.start(stems.job())
    stem.kill("nobody")


PARENT = """
import os, sys, time
from pathlib import Path
from wellfed.trials.fork_server import Job, Stem

def work(prepared, task):
    if os.fork() == 0:
        pass  # a worker of the job's
    with open("pids", "a") as stream:
        print(os.getpid(), file=stream)
    time.sleep(600)

stem = Stem(lambda: Path("pids").write_text(f"{os.getpid()}\\n"), work, Path("log"))
second = Stem(lambda: time.sleep(600), work, Path("log"))  # which holds nothing of the first
stem.wait_ready(60)
stem.start(Job("a", Path(".")))
print("inside", flush=True)
time.sleep(600)
"""


def test_a_parent_that_is_killed_takes_stem_and_job_along(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=tmp_path, env=SOURCE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout:
        parent.stdout.readline()
    until(lambda: len((tmp_path / "pids").read_text().splitlines()) == 3)
    stem, *jobs = map(int, (tmp_path / "pids").read_text().splitlines())
    workers = [pid for pid in jobs if psutil.Process(pid).ppid() != stem]
    children = [each.pid for each in psutil.Process(parent.pid).children()]
    try:
        parent.kill()
        parent.wait()
        until(lambda: all(is_gone(pid) for pid in {stem, *jobs, *children} - set(workers)))
    finally:
        for pid in workers:  # the job's own matter: a loader's workers look for their parent
            os.kill(pid, signal.SIGKILL)


def test_a_stem_holds_no_connection_to_another(stems: Stems) -> None:
    """Else closing the first would have to wait, and then to kill it."""
    first = stems.ready(lambda prepared, task: 0)
    link = os.readlink(f"/proc/self/fd/{first.connection.fileno()}")
    stems.ready(lambda prepared, task: 0, lambda: print(os.getpid()))
    second = Path(f"/proc/{number_in(stems.folder / 'stem1.log')}/fd")
    assert link not in [os.readlink(path) for path in second.iterdir() if path.is_symlink()]


def test_closing_ends_what_is_busy_and_may_be_done_twice(stems: Stems) -> None:
    def work(prepared: Any, task: Any) -> int:
        time.sleep(600)
        return 0

    stem = stems.ready(work)
    stem.start(stems.job())
    stem.close()
    stem.close()


def test_closing_ends_one_that_is_stuck_in_preparing(stems: Stems) -> None:
    def prepare() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("stuck", flush=True)
        time.sleep(600)

    stem = stems(prepare=prepare)
    until(lambda: last_lines(stems.folder / "stem0.log", 1) == ["stuck"])
    stem.close()


def test_the_terminals_ctrl_c_does_not_reach_it(stems: Stems) -> None:
    _, out, _ = stems.run(lambda prepared, task: print(os.getpgid(0), os.getsid(0)) or 0)
    group, session = map(int, out.split())
    assert group != os.getpgid(0)
    assert session != os.getsid(0)


def test_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "x"
    assert last_lines(path, 3) == []
    path.write_bytes(b"a\n\n  \nb \xff \r\nc")
    assert last_lines(path, 2) == ["b \ufffd", "c"]
    path.write_bytes(b"y" * 10**6 + b"\nend\n")
    assert last_lines(path, 1) == ["end"]
