"""A process that is kept: real ones, of little work."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wellfed.study.clusters import keeper
from wellfed.study.clusters.keeper import Keeper, ProcessSettings, do_one, read_frame, write_frame

SRC = Path(__file__).parents[3] / "src"
PROGRAM = """
import os, sys, time
from wellfed.study.clusters.keeper import read_frame, write_frame
greeting = read_frame(sys.stdin.buffer)
write_frame(sys.stdout.buffer, greeting)
while True:
    try:
        order = read_frame(sys.stdin.buffer).decode()
    except EOFError:
        break
    answer = str(eval(order)).encode()
    write_frame(sys.stdout.buffer, answer)
"""
"""Evaluates each order; its greeting is what keeps it from working."""


def settings(folder: Path, problem: str = "", program: str = PROGRAM) -> ProcessSettings:
    return ProcessSettings(("-c", program), str(folder), (str(SRC), "/no/such/folder"), problem.encode())


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Keeper]:
    made = Keeper(settings(tmp_path))
    yield made
    made.close()


@given(st.lists(st.binary(max_size=300)))
def test_frames_arrive_as_they_were_sent(contents: list[bytes]) -> None:
    stream = BytesIO()
    for content in contents:
        write_frame(stream, content)
    stream.seek(0)
    assert [read_frame(stream) for _ in contents] == contents
    with pytest.raises(EOFError):
        read_frame(stream)


@given(st.binary(max_size=300), st.integers(min_value=1))
def test_a_frame_that_is_cut_anywhere_is_none(content: bytes, cut: int) -> None:
    stream = BytesIO()
    write_frame(stream, content)
    whole = stream.getvalue()
    with pytest.raises(EOFError):
        read_frame(BytesIO(whole[: len(whole) - 1 - cut % len(whole)]))


def test_orders_are_done_one_after_the_other_in_one_process(kept: Keeper, tmp_path: Path) -> None:
    greeted = kept.greet()
    assert (greeted.host, greeted.problem, greeted.is_unfit) == (socket.gethostname(), "", False)
    first, second = kept.do(b"os.getpid()"), kept.do(b"os.getpid()")
    assert first.answer == second.answer
    assert first.answer != str(os.getpid()).encode()
    assert kept.do(b"os.getcwd()").answer == str(tmp_path).encode()


def test_what_would_make_a_run_a_rank_of_another_is_taken_away(kept: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "1")
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    kept.greet()
    names = eval(kept.do(b"sorted(os.environ)").answer)
    assert {"SLURM_NTASKS_PER_NODE", "SLURM_PROCID", "LOCAL_RANK"} & set(names) == set()
    assert "SLURM_JOB_ID" in names


@pytest.mark.parametrize(
    ("order", "problem"),
    [
        (b"os.kill(os.getpid(), 9)", "its process ended by SIGKILL"),
        (b"1 / 0", "its process ended with exit code 1: ZeroDivisionError: division by zero"),
        (b"os._exit(3)", "its process ended with exit code 3"),
    ],
)
def test_a_process_that_ends_is_told_with_its_last_word(kept: Keeper, order: bytes, problem: str) -> None:
    kept.greet()
    told = kept.do(order)
    assert (told.answer, told.problem, told.is_unfit) == (None, problem, False)


def test_what_keeps_a_machine_from_working_is_told(tmp_path: Path) -> None:
    told = do_one(settings(tmp_path, "other code"), b"1")
    assert (told.problem, told.is_unfit) == ("other code", True)
    told = do_one(settings(tmp_path / "gone"), b"1")
    assert (told.problem, told.is_unfit) == (f"there is no folder {tmp_path / 'gone'}", True)
    told = do_one(settings(tmp_path, program="import no_such_module"), b"1")
    assert told.is_unfit
    assert told.problem.endswith("exit code 1: ModuleNotFoundError: No module named 'no_such_module'")


def test_closing_ends_the_process_and_what_it_has_started(tmp_path: Path) -> None:
    kept = Keeper(settings(tmp_path))
    kept.greet()
    process = psutil.Process(int(kept.do(b"os.getpid()").answer))
    kept.close()
    assert not process.is_running()
    kept.close()
    assert do_one(settings(tmp_path), b"6 * 7").answer == b"42"


@pytest.mark.slow
def test_a_stuck_one_is_killed(tmp_path: Path) -> None:
    kept = Keeper(settings(tmp_path, program=PROGRAM.replace("break", "time.sleep(600)")))
    kept.greet()
    process = psutil.Process(int(kept.do(b"os.getpid()").answer))
    began_s = time.monotonic()
    kept.close()
    assert not process.is_running()
    assert time.monotonic() - began_s < 60


@pytest.mark.guests  # cloudpickle comes with submitit
def test_it_can_be_sent_where_nothing_of_this_project_is(tmp_path: Path) -> None:
    """By value: a machine that has no wellfed can still say so."""
    cloudpickle = pytest.importorskip("cloudpickle")
    cloudpickle.register_pickle_by_value(keeper)
    try:
        sent = cloudpickle.dumps((do_one, settings(tmp_path, program="import wellfed.nothing")))
    finally:
        cloudpickle.unregister_pickle_by_value(keeper)
    program = (
        "import pickle, sys\n"
        "do_one, settings = pickle.loads(sys.stdin.buffer.read())\n"
        "assert not any(name.startswith('wellfed') for name in sys.modules)\n"
        "print(do_one(settings, b'').problem)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], input=sent, capture_output=True, cwd=tmp_path)
    assert done.stdout.decode().strip().endswith("ModuleNotFoundError: No module named 'wellfed.nothing'"), done.stderr
