"""The process that runs a trial on another machine: real ones, of little work."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from wellfed.study.executors import trial_process
from wellfed.study.executors.trial_process import ProcessAnswer, ProcessStart, keep_to_share, run_process

CPUS = sorted(os.sched_getaffinity(0))

EVALUATE = "import os, sys; answer = str(eval(sys.stdin.buffer.read())); sys.stdout.buffer.write(answer.encode())"


def start(folder: Path, program: str = EVALUATE) -> ProcessStart:
    return ProcessStart(program, str(folder), (str(folder), "/no/such/folder"))


def test_a_trial_goes_in_and_its_answer_comes_back(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("NUMBER = 42")
    assert run_process(start(tmp_path), b"os.getcwd()") == ProcessAnswer(socket.gethostname(), str(tmp_path).encode())
    assert run_process(start(tmp_path), b"__import__('own').NUMBER").content == b"42"


def test_variables_that_would_make_a_trial_a_rank_of_another_run_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_NTASKS_PER_NODE", "SLURM_PROCID", "LOCAL_RANK", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "1")
    names = eval(run_process(start(tmp_path), b"sorted(os.environ)").content or b"")
    assert {"SLURM_NTASKS_PER_NODE", "SLURM_PROCID", "LOCAL_RANK"} & set(names) == set()
    assert "SLURM_JOB_ID" in names


@pytest.mark.parametrize(
    ("trial", "problem", "is_unfit"),
    [
        (b"os.kill(os.getpid(), 9)", "the process that watched the trial was ended by SIGKILL", False),
        (b"1 / 0", "ZeroDivisionError: division by zero", True),
        (b"sys.exit('other code')", "other code", True),
        (b"os._exit(3)", "its process ended with exit code 3", True),
    ],
)
def test_a_process_that_ends_without_an_answer(tmp_path: Path, trial: bytes, problem: str, is_unfit: bool) -> None:
    answer = run_process(start(tmp_path), trial)
    assert (answer.content, answer.problem, answer.is_unfit) == (None, problem, is_unfit)


@pytest.mark.skipif(CPUS[1:] == [], reason="one CPU can't be shared")
@pytest.mark.parametrize(
    ("gpus", "number", "cpus"),
    [
        ([0], 2, CPUS[: len(CPUS) // 2]),
        (["1"], 2, CPUS[len(CPUS) // 2 : len(CPUS) // 2 * 2]),
        ([1, 0], 2, CPUS[: len(CPUS) // 2 * 2]),
        ([1], len(CPUS), CPUS[1:2]),
        ([], 2, CPUS),  # it trains on the processor
        ([0], 1, CPUS),
        ([0], 1 + len(CPUS), CPUS),
        ([2], 2, CPUS),
        (["GPU-7f2d"], 2, CPUS),
    ],
)
def test_a_trial_keeps_to_the_cpus_of_its_gpus(
    tmp_path: Path, gpus: list[object], number: int, cpus: list[int]
) -> None:
    found = []

    def run() -> None:
        keep_to_share(gpus, number)
        found.append(run_process(start(tmp_path), b"sorted(os.sched_getaffinity(0))").content)

    thread = threading.Thread(target=run)  # the CPUs of this test's own thread stay
    thread.start()
    thread.join()
    assert found == [str(cpus).encode()]


def test_a_machine_without_the_folder_or_the_code_is_unfit(tmp_path: Path) -> None:
    gone = run_process(start(tmp_path / "gone"), b"1")
    assert (gone.problem, gone.is_unfit) == (f"there is no folder {tmp_path / 'gone'}", True)
    other = run_process(start(tmp_path, "import no_such_module"), b"1")
    assert (other.problem, other.is_unfit) == ("ModuleNotFoundError: No module named 'no_such_module'", True)


def test_a_job_that_is_cancelled_ends_its_trial(tmp_path: Path) -> None:
    def interrupt() -> None:
        while not (tmp_path / "pid").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    threading.Thread(target=interrupt).start()
    program = "import os, time; open('new', 'w').write(str(os.getpid())); os.rename('new', 'pid'); time.sleep(600)"
    try:
        with pytest.raises(KeyboardInterrupt):
            run_process(start(tmp_path, program), b"")
    finally:
        signal.signal(signal.SIGINT, before)
    process = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(process) or psutil.Process(process).wait(10) is not None


@pytest.mark.guests  # cloudpickle comes with submitit
def test_it_can_be_sent_where_nothing_of_this_project_is(tmp_path: Path) -> None:
    """By value: a machine that has no wellfed can still say so."""
    cloudpickle = pytest.importorskip("cloudpickle")
    cloudpickle.register_pickle_by_value(trial_process)
    try:
        sent = cloudpickle.dumps((run_process, start(tmp_path, "import wellfed.nothing")))
    finally:
        cloudpickle.unregister_pickle_by_value(trial_process)
    program = (
        "import pickle, sys\n"
        "run_process, start = pickle.loads(sys.stdin.buffer.read())\n"
        "assert not any(name.startswith('wellfed') for name in sys.modules)\n"
        "print(run_process(start, b'').problem)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], input=sent, capture_output=True, cwd=tmp_path)
    assert done.stdout.decode().strip().endswith("ModuleNotFoundError: No module named 'wellfed.nothing'"), done.stderr
