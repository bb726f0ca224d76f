"""Fork servers and their jobs, with real forks: what comes back, and that no process stays behind."""

import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from inspect import signature
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

import wellfed
from tests.kit.few import few, slow
from tests.kit.watched import until
from wellfed.errors import ConfigError, DataError, Fault
from wellfed.process import MAY_FORK
from wellfed.study.executors.fork_server import ForkServer, ForkServerFailed, Job, JobEnd, Said
from wellfed.study.trial_end import last_lines

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

    def run(self, work: Callable[[Any, Any], int], task: Any = None, **more: Any) -> tuple[JobEnd, str, str]:
        """One job's end, and what it printed."""
        server, job = self.ready(work), self.job(task, **more)
        server.start(job)
        ended = server.take()
        assert ended.key == job.key
        return ended, *((job.folder / name).read_text() for name in ("stdout.txt", "stderr.txt"))


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    """Closed at the end, and then no process is left."""
    before = set(psutil.Process().children())  # those of earlier tests may start others meanwhile
    made = Servers(tmp_path)
    yield made
    for server in made.made:
        server.close()
    assert set(psutil.Process().children()) <= before


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


def test_what_the_parent_has_not_written_yet_is_not_written_twice(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from wellfed.study.executors.fork_server import ForkServer, Job
print("before", end=" ")
sys.stderr.write("warned ")
def work(prepared, study):
    print("worked")
    return 0
server = ForkServer(lambda: print("prepared"), Path("log"), 60)
server.wait_ready()
server.start(Job("a", Path("."), work))
server.take()
server.close()
print("after")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=SOURCE, capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("before after\n", "warned ", 0)
    assert (tmp_path / "log").read_text() == "prepared\n"
    assert (tmp_path / "stdout.txt").read_text() == "worked\n"


def test_a_job_has_its_environment_and_its_processors(servers: Servers) -> None:
    cpu = min(os.sched_getaffinity(0))

    def work(prepared: Any, task: Any) -> int:
        print(os.environ["CUDA_VISIBLE_DEVICES"], sorted(os.sched_getaffinity(0)))
        return 0

    _, out, _ = servers.run(work, environment={"CUDA_VISIBLE_DEVICES": "GPU-7"}, cpus=frozenset({cpu}))
    assert out == f"GPU-7 [{cpu}]\n"
    assert os.environ.get("CUDA_VISIBLE_DEVICES") != "GPU-7"


@pytest.mark.parametrize("code", [0, 3, *map(slow, (1, 130, 255))])
def test_the_exit_code_is_what_the_work_gives(servers: Servers, code: int) -> None:
    assert servers.run(lambda prepared, task: task, code)[0].code == code


@pytest.mark.parametrize(("given", "code"), [(None, 0), (7, 7), ("words", 1)])
def test_one_that_calls_exit_ends_with_that(servers: Servers, given: object, code: int) -> None:
    assert servers.run(lambda prepared, task: sys.exit(task), given)[0].code == code


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        *map(slow, (signal.SIGTERM, signal.SIGINT, signal.SIGABRT)),
    ],
)
def test_a_signal_is_told_as_a_negative_code(servers: Servers, number: signal.Signals) -> None:
    def work(prepared: Any, task: int) -> int:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), task)
        time.sleep(LONG_S)
        return 0

    assert servers.run(work, int(number))[0].code == -number


def test_a_crash_is_told_and_the_next_job_runs(servers: Servers) -> None:
    server = servers.ready(lambda prepared, task: crash() if task == "crash" else 5)
    codes = []
    for task in ("crash", "go on"):
        server.start(servers.job(task))
        codes.append(server.take().code)
    assert codes == [-signal.SIGSEGV, 5]


@pytest.mark.parametrize("error", [ValueError("odd value"), KeyboardInterrupt()])
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
        server.start(servers.job())
        codes.append(server.take().code)
    assert codes == [1, 1, 1]
    assert (servers.folder / "server0.log").read_text() == "preparing\n"


def test_jobs_run_at_the_same_time_and_each_is_told_when_it_ends(servers: Servers) -> None:
    def work(prepared: Any, task: tuple[str, str]) -> int:
        """Ends after another that was started later."""
        mine, awaited = (servers.folder / name for name in task)
        mine.touch()
        until(awaited.exists)
        return 0

    server = servers.ready(work)
    jobs = [servers.job(task) for task in (("a", "end"), ("b", "a"), ("c", "b"))]
    for job in jobs:
        server.start(job)
    assert {server.take().key for _ in range(2)} == {jobs[1].key, jobs[2].key}
    (servers.folder / "end").touch()
    ended = server.take()
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


def test_what_takes_too_long_is_killed_with_what_it_has_started_and_leaves_its_neighbour(servers: Servers) -> None:
    server = servers.ready(grandchild)
    (servers.folder / "one").mkdir()
    (servers.folder / "other").mkdir()
    other = servers.job(f"{servers.folder / 'other'}:stay")
    one = servers.job(f"{servers.folder / 'one'}:stay", limit_s=5)
    server.start(one)
    server.start(other)
    killed, spared = (number_in(servers.folder / name / "pid") for name in ("one", "other"))
    ended = server.take()
    assert isinstance(ended, JobEnd)
    assert (ended.key, ended.code, ended.is_timeout) == (one.key, -signal.SIGKILL, True)
    assert ended.seconds >= 5
    until(lambda: is_gone(killed))
    assert not is_gone(spared)
    server.close()
    until(lambda: is_gone(spared))


def test_what_a_job_leaves_behind_ends_with_it(servers: Servers) -> None:
    assert servers.run(grandchild, str(servers.folder))[0].code == 0
    until(lambda: is_gone(number_in(servers.folder / "pid")))


def test_a_job_ends_though_a_process_that_it_has_forked_lives_on(servers: Servers) -> None:
    def work(prepared: Any, task: Path) -> int:
        if os.fork() == 0:
            time.sleep(600)
        task.write_text("done")
        return 3

    server, job = servers.ready(work), servers.job(servers.folder / "done")
    server.start(job)
    assert server.connection.poll(LONG_S)
    assert server.take().code == 3


@dataclass(frozen=True)
class Answer:
    """What a job may tell."""

    number: int
    more: bytes = b""


def test_what_a_job_answers_comes_with_its_end(servers: Servers) -> None:
    def work(prepared: list[int], task: int, study: Connection) -> int:
        for number in prepared[:task]:
            study.send(Answer(number, bytes(10**6)))  # more than a pipe holds
        return 0

    server = servers.ready(work, lambda: [3, 1, 2])
    assert server.ask(servers.job(3)) == [Answer(number, bytes(10**6)) for number in (3, 1, 2)]
    assert server.ask(servers.job(0)) == []


@pytest.mark.parametrize("end", ["kill", *map(slow, ("raise", "hang"))])
def test_what_it_has_answered_before_it_died_counts(servers: Servers, end: str) -> None:
    def work(prepared: Any, task: str, study: Connection) -> int:
        study.send(Answer(1))
        if task == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        while task == "hang":
            time.sleep(0.01)
        raise ValueError("odd value")

    server = servers.ready(work)
    assert server.ask(servers.job(end, limit_s=2)) == [Answer(1)]


@pytest.mark.slow
def test_jobs_that_run_at_the_same_time_have_their_own_answers(servers: Servers) -> None:
    def work(prepared: Any, task: int, study: Connection) -> int:
        for number in range(50):
            study.send(Answer(100 * task + number))
        return 0

    server = servers.ready(work)
    jobs = {(job := servers.job(task)).key: (job, task) for task in range(4)}
    for job, _ in jobs.values():
        server.start(job)
    answers: dict[str, list[Answer]] = {key: [] for key in jobs}
    ended = set()
    while ended != set(jobs):
        told = server.take()
        if isinstance(told, JobEnd):
            ended.add(told.key)
        else:
            assert told.key not in ended
            answers[told.key].append(told.what)
    for key, (_, task) in jobs.items():
        assert answers[key] == [Answer(100 * task + number) for number in range(50)]


def fail(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("prepare", "problem", "status"),
    few(
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
        3,
    ),
    ids=["raises", "bad data", "bad configuration", "exits", "leaves", "crashes", "interrupted"],
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


def test_imports_do_not_count_as_preparing(tmp_path: Path) -> None:
    with closing(ForkServer(lambda: None, tmp_path / "log", 0.5, imports=lambda: time.sleep(1.5))) as server:
        server.wait_ready()


def test_imports_that_fail_are_told(tmp_path: Path) -> None:
    def fail() -> None:
        raise ModuleNotFoundError("No module named 'torch'")

    failed = pytest.raises(ForkServerFailed, match="ModuleNotFoundError: No module named 'torch'")
    with closing(ForkServer(lambda: None, tmp_path / "log", LONG_S, imports=fail)) as server, failed:
        server.wait_ready()


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_server_that_is_killed_is_told_and_its_jobs_die(servers: Servers, is_busy: bool) -> None:
    def work(pid: int, task: str) -> int:
        Path(task).write_text(f"{os.getpid()}\n")
        time.sleep(600)
        return 0

    server = servers.ready(work, lambda: print(os.getpid()))
    pid = number_in(servers.folder / "server0.log")
    if is_busy:
        server.start(servers.job(str(servers.folder / "pid")))
        job = number_in(servers.folder / "pid")
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ForkServerFailed, match="the process that holds data and model has died"):
        server.take()
    if is_busy:
        until(lambda: is_gone(job))
    with pytest.raises(ForkServerFailed, match="has died"):
        server.start(servers.job())


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
server.start(Job("a", Path("."), work))
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


def test_a_server_holds_no_connection_to_another(servers: Servers) -> None:
    """Else closing the first would have to wait, and then to kill it."""
    first = servers.ready(lambda prepared, task: 0)
    link = os.readlink(f"/proc/self/fd/{first.connection.fileno()}")
    servers.ready(lambda prepared, task: 0, lambda: print(os.getpid()))
    second = Path(f"/proc/{number_in(servers.folder / 'server1.log')}/fd")
    assert link not in [os.readlink(path) for path in second.iterdir() if path.is_symlink()]


def test_closing_ends_what_is_busy_and_may_be_done_twice(servers: Servers) -> None:
    def work(prepared: Any, task: Any) -> int:
        time.sleep(600)
        return 0

    server = servers.ready(work)
    server.start(servers.job())
    server.close()
    server.close()


def test_closing_ends_one_that_is_stuck_in_preparing(servers: Servers) -> None:
    def prepare() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("stuck", flush=True)
        time.sleep(600)

    server = servers(prepare=prepare)
    until(lambda: last_lines(servers.folder / "server0.log", 1) == ["stuck"])
    server.close()


def test_the_terminals_ctrl_c_does_not_reach_it(servers: Servers) -> None:
    _, out, _ = servers.run(lambda prepared, task: print(os.getpgid(0), os.getsid(0)) or 0)
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


def test_a_job_that_asks_waits_for_the_reply(servers: Servers) -> None:
    def work(prepared: int, task: int, study: Connection) -> int:
        replies = [ask(study, (task, number)) for number in range(3)]
        return sum(replies) + prepared

    server = servers.ready(work, lambda: 100)
    jobs = {(job := servers.job(task)).key: (job, task) for task in (1, 2)}
    for job, _ in jobs.values():
        server.start(job)
    ends, heard = {}, []
    while len(ends) < 2:
        told = server.take()
        if isinstance(told, Said):
            heard.append((told.key, *told.what))
            server.reply(Said(told.key, 10 * told.what[0] + told.what[1]))
        else:
            ends[told.key] = told.code
    assert [ends[key] for key in jobs] == [133, 163]
    assert sorted(heard) == [(key, task, number) for key, (_, task) in jobs.items() for number in range(3)]


def test_a_job_that_is_killed_while_it_asks_is_told_and_the_reply_goes_nowhere(servers: Servers) -> None:
    def work(prepared: Any, task: Any, study: Connection) -> int:
        return int(ask(study, "what now?"))

    server, lost, kept = servers.ready(work), servers.job(limit_s=1), servers.job()
    server.start(lost)
    assert server.take() == Said(lost.key, "what now?")
    ended = server.take()
    assert isinstance(ended, JobEnd)
    assert ended.code == -signal.SIGKILL
    server.reply(Said(lost.key, 1))
    server.start(kept)
    assert server.take() == Said(kept.key, "what now?")
    server.reply(Said(kept.key, 7))
    assert server.take().code == 7
