"""Fork servers and their jobs, with real forks: what comes back, and that no process stays behind."""

import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from inspect import signature
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

import wellfed
from tests.kit.watched import until
from wellfed.errors import ConfigError, Fault
from wellfed.process import MAY_FORK
from wellfed.study.executors.fork_server import ForkServer, ForkServerFailed, Job, Said
from wellfed.study.trial_end import TrialEnd

pytestmark = pytest.mark.skipif(not MAY_FORK, reason="forks")
LONG_S = 60
SOURCE = {**os.environ, "PYTHONPATH": str(Path(wellfed.__file__).parents[1]), "PYTHONUNBUFFERED": ""}


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def ask(study: Connection, what: Any) -> Any:
    study.send(what)
    return study.recv()


def crash() -> int:
    """As native code does; without what pytest would print."""
    faulthandler.disable()
    return len(ctypes.string_at(0))


def number_in(path: Path) -> int:
    """That another process writes there."""
    until(lambda: path.exists() and path.read_text().endswith("\n"))
    return int(path.read_text())


def call(prepared: tuple[Any, Callable[..., int]], study: Connection, task: Any) -> int:
    """Calls what the server has beside its objects, which need not be pickled."""
    made, work = prepared
    return work(made, task, study) if len(signature(work).parameters) == 3 else work(made, task)


class Servers:
    """Makes servers whose work is ``work(prepared, task)``; runs jobs in them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.made, self.numbers = folder, [], 0

    def __call__(
        self, work: Callable[..., int] = lambda prepared, task: 0, prepare: Any = lambda: None, limit_s: float = LONG_S
    ) -> ForkServer:
        log = self.folder / f"server{len(self.made)}.log"
        self.made.append(ForkServer(lambda: (prepare(), work), log, limit_s))
        return self.made[-1]

    def ready(self, work: Callable[..., Any], prepare: Any = lambda: None) -> ForkServer:
        server = self(work, prepare)
        server.wait_ready()
        return server

    def job(self, task: Any = None, **more: Any) -> Job:
        self.numbers += 1
        folder = self.folder / f"job{self.numbers}"
        folder.mkdir()
        return Job(folder.name, folder, partial(call, task=task), **more)

    def run(self, work: Callable[[Any, Any], int], task: Any = None, **more: Any) -> tuple[TrialEnd, str, str]:
        """One job's end, and what it printed."""
        server, job = self.ready(work), self.job(task, **more)
        server.send(job)
        told = server.take()
        assert told.key == job.key
        return told.what, *((job.folder / name).read_text() for name in ("stdout.txt", "stderr.txt"))


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    """Closed at the end, and then no process is left."""
    before = set(psutil.Process().children())  # those of earlier tests may start others meanwhile
    made = Servers(tmp_path)
    yield made
    for server in made.made:
        server.close()
    left = set(psutil.Process().children()) - before
    assert [one for one in left if one.status() != psutil.STATUS_ZOMBIE] == []  # init may reap orphans late


def test_what_a_job_and_its_children_print_goes_to_its_folder(
    servers: Servers, capfd: pytest.CaptureFixture[str]
) -> None:
    def work(prepared: Any, task: Any) -> int:
        print("said ü")
        print("wrong", file=sys.stderr)
        subprocess.run(["sh", "-c", "echo child; echo child wrong >&2; cat"], check=True)
        return 0

    ended, out, err = servers.run(work)
    assert (ended.code, out, err) == (0, "said ü\nchild\n", "wrong\nchild wrong\n")
    assert capfd.readouterr() == ("", "")


def test_an_exit_code_and_a_signal_are_told(servers: Servers) -> None:
    assert servers.run(lambda prepared, task: task, 3)[0].code == 3
    assert servers.run(lambda prepared, task: os.kill(os.getpid(), task) or 0, 9)[0].code == -signal.SIGKILL


@pytest.mark.parametrize("error", [ValueError("odd value")])
def test_an_exception_leaves_its_traceback(servers: Servers, error: BaseException) -> None:
    def work(prepared: Any, task: BaseException) -> int:
        raise task

    ended, _, err = servers.run(work, error)
    assert ended.code == 1
    assert err.startswith("Traceback (most recent call last):")
    assert err.rstrip().endswith(str(error) or "KeyboardInterrupt")


def test_what_is_prepared_is_prepared_once_and_changes_in_a_job_stay_there(servers: Servers) -> None:
    def work(prepared: list[int], task: Any) -> int:
        prepared.append(1)
        return len(prepared)

    server = servers.ready(work, lambda: print("preparing") or [])
    codes = []
    for _ in range(3):
        server.send(servers.job())
        codes.append(server.take().what.code)
    assert codes == [1, 1, 1]
    assert (servers.folder / "server0.log").read_text() == "preparing\n"


def grandchild(prepared: Any, task: str) -> int:
    """Starts a process that writes its number and would live on; then waits, or ends."""
    script = "echo $$ > pid.new; mv pid.new pid; exec sleep 600"
    subprocess.Popen(["sh", "-c", script], cwd=task.partition(":")[0])
    until((Path(task.partition(":")[0]) / "pid").exists)
    if task.endswith(":stay"):
        time.sleep(600)
    return 0


def test_what_takes_too_long_is_killed_with_what_it_has_started_and_leaves_its_neighbour(servers: Servers) -> None:
    server = servers.ready(grandchild)
    (servers.folder / "one").mkdir()
    (servers.folder / "other").mkdir()
    other = servers.job(f"{servers.folder / 'other'}:stay")
    one = servers.job(f"{servers.folder / 'one'}:stay", limit_s=3)
    server.send(one)
    server.send(other)
    killed, spared = (number_in(servers.folder / name / "pid") for name in ("one", "other"))
    told = server.take()
    ended = told.what
    assert isinstance(ended, TrialEnd)
    assert (told.key, ended.code, ended.is_timeout) == (one.key, -signal.SIGKILL, True)
    assert ended.seconds >= 3
    until(lambda: is_gone(killed))
    assert not is_gone(spared)
    server.close()
    until(lambda: is_gone(spared))


def fail(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("prepare", "problem", "status"),
    [
        (partial(fail, ValueError("odd value")), "ValueError: odd value", "failed"),
        (partial(fail, ConfigError([Fault("a", "is 1.", "Set 2.")])), "a: is 1. Set 2.", "invalid"),
        (crash, "the process that holds data and model has died", "failed"),
    ],
    ids=["raises", "bad configuration", "crashes"],
)
def test_what_can_not_be_prepared_is_told(servers: Servers, prepare: Any, problem: str, status: str) -> None:
    server = servers(prepare=prepare)
    with pytest.raises(ForkServerFailed) as caught:
        server.wait_ready()
    assert problem in str(caught.value)
    assert caught.value.status == status


def test_preparing_that_takes_too_long_is_told_and_ended(servers: Servers) -> None:
    server = servers(prepare=lambda: time.sleep(LONG_S), limit_s=0.2)
    with pytest.raises(ForkServerFailed, match="were not there after 0.2 s; see .*server0.log") as caught:
        server.wait_ready()
    assert caught.value.status == "timeout"


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_server_that_is_killed_is_told_and_its_jobs_die(servers: Servers, is_busy: bool) -> None:
    def work(pid: int, task: str) -> int:
        Path(task).write_text(f"{os.getpid()}\n")
        time.sleep(600)
        return 0

    server = servers.ready(work, lambda: print(os.getpid()))
    pid = number_in(servers.folder / "server0.log")
    if is_busy:
        server.send(servers.job(str(servers.folder / "pid")))
        job = number_in(servers.folder / "pid")
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ForkServerFailed, match="the process that holds data and model has died"):
        server.take()
    if is_busy:
        until(lambda: is_gone(job))
    with pytest.raises(ForkServerFailed, match="has died"):
        server.send(servers.job())


PARENT = """
import os, sys, time
from pathlib import Path
from wellfed.study.executors.fork_server import ForkServer, Job

def work(prepared, study):
    if os.fork() == 0:
        pass  # a worker of the job's
    with open("pids", "a") as stream:
        print(os.getpid(), file=stream)
    time.sleep(600)

server = ForkServer(lambda: Path("pids").write_text(f"{os.getpid()}\\n"), Path("log"), 60)
second = ForkServer(lambda: time.sleep(600), Path("log"), 60)  # which holds nothing of the first
server.wait_ready()
server.send(Job("a", Path("."), work))
print("inside", flush=True)
time.sleep(600)
"""


def test_a_parent_that_is_killed_takes_server_and_job_along(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=tmp_path, env=SOURCE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout:
        parent.stdout.readline()
    until(lambda: len((tmp_path / "pids").read_text().splitlines()) == 3)
    server, *jobs = map(int, (tmp_path / "pids").read_text().splitlines())
    workers = [pid for pid in jobs if psutil.Process(pid).ppid() != server]
    children = [each.pid for each in psutil.Process(parent.pid).children()]
    try:
        parent.kill()
        parent.wait()
        until(lambda: all(is_gone(pid) for pid in {server, *jobs, *children} - set(workers)))
    finally:
        for pid in workers:  # the job's own matter: a loader's workers look for their parent
            os.kill(pid, signal.SIGKILL)


def test_a_job_that_asks_waits_for_the_reply(servers: Servers) -> None:
    def work(prepared: int, task: int, study: Connection) -> int:
        replies = [ask(study, (task, number)) for number in range(3)]
        return sum(replies) + prepared

    server = servers.ready(work, lambda: 100)
    jobs = {(job := servers.job(task)).key: (job, task) for task in (1, 2)}
    for job, _ in jobs.values():
        server.send(job)
    ends, heard = {}, []
    while len(ends) < 2:
        told = server.take()
        if not isinstance(told.what, TrialEnd):
            heard.append((told.key, *told.what))
            server.send(Said(told.key, 10 * told.what[0] + told.what[1]))
        else:
            ends[told.key] = told.what.code
    assert [ends[key] for key in jobs] == [133, 163]
    assert sorted(heard) == [(key, task, number) for key, (_, task) in jobs.items() for number in range(3)]
