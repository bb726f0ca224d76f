"""``python -m wellfed monitor``: in a terminal, in a pipe, in the background; what ends it; what it refuses."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.end_to_end.commands import ROOT
from tests.fake_nvml.driver import FakeDriver, FakeGpu, Scenario, Wave
from tests.kit.small_terminal import SmallTerminal, has_terminals
from tests.kit.tables import rows_of
from tests.kit.watched import a100, h200
from wellfed.cli import main as cli
from wellfed.cli.commands import monitor
from wellfed.watch.seen_gpus import FoundGpus

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
TWO = Scenario([h200("GPU-1", power_limit_w=700, processes=[(4711, 5.0, "/bin/train")]), a100("GPU-2", util=90)])


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "find_gpus", lambda: FoundGpus((), "library not found"))


@pytest.mark.slow
def test_without_nvml_it_watches_the_host_and_says_why(no_gpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["monitor", "--for", "1.05", "--interval", "0.1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "Watching the host alone for 1.05 s.",
        "No GPU figures (NVML: library not found). python -m wellfed doctor says what is missing.",
    ]
    assert re.fullmatch(r"\d\d:\d\d:\d\d host CPU \d+ % of \d+ cores, memory [\d.]+/[\d.]+ GiB", lines[2])
    assert re.fullmatch(r"Watched for 1\.\d s\.", lines[3])
    assert lines[4] == "GPU utilisation is unknown (NVML: library not found)."
    assert lines[-1] == "What is missing: python -m wellfed doctor"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seconds", "-3"], "--for/--seconds: -3: must be seconds from 0 on; 0 = until Ctrl-C"),
        (["--seconds", "nan"], "--for/--seconds: nan: must be"),
        (["--interval", "0.05"], "--interval: 0.05: must be seconds from 0.1 on"),
        (["--gpus", "0;1"], "--gpus: 0;1: must be numbers with commas between them, as 0,1"),
    ],
)
def test_what_is_no_time_and_no_number_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["monitor", *words])
    assert ended.value.code == 2
    assert f"error: argument {message}" in capsys.readouterr().err


def test_a_file_that_is_there_stays_as_it_is(no_gpu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "curves.csv"
    path.write_text("mine")
    assert cli.main(["monitor", "--seconds", "5", "--csv", str(path)]) == 2
    assert "is not overwritten" in capsys.readouterr().err
    assert path.read_text() == "mine"


@pytest.fixture
def handlers() -> Iterator[None]:
    """Restores the handlers: a command that a signal has ended ignores later signals."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(
    ("signum", "seconds", "code"), [("SIGINT", "0", 0), ("SIGINT", "60", 130), ("SIGTERM", "0", 143)]
)
def test_a_signal_ends_it_with_the_summary(
    no_gpu: None, signum: str, seconds: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    timer = threading.Timer(0.3, os.kill, (os.getpid(), getattr(signal, signum)))
    timer.start()
    assert cli.main(["monitor", "--seconds", seconds, "--interval", "0.1"]) == code
    out = capsys.readouterr().out
    assert "Watched for " in out
    assert "CPU: mean " in out


def test_a_signal_while_it_looks_for_gpus_ends_it_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def waits() -> FoundGpus:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
        return FoundGpus((), "late")

    monkeypatch.setattr(monitor, "find_gpus", waits)
    assert cli.main(["monitor"]) == 143
    assert capsys.readouterr().out == ""


def variables(driver: FakeDriver, scenario: Scenario, **more: str) -> dict[str, str]:
    ours = ("COLUMNS", "LINES", "NO_COLOR")
    known = {name: value for name, value in driver.environment(scenario).items() if name not in ours}
    return {**known, "PYTHONPATH": str(ROOT / "src"), "TERM": "xterm", "LC_ALL": "C.UTF-8", **more}


COMMAND = (sys.executable, "-m", "wellfed", "monitor")


@contextmanager
def in_pipe(environ: dict[str, str], *words: str) -> Iterator[subprocess.Popen[str]]:
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environ}
    with subprocess.Popen([*COMMAND, *words], **options) as process:
        try:
            yield process
        finally:
            process.kill()


def test_in_a_pipe_it_is_a_line_a_second_flushed_and_sigterm_brings_the_summary(fake_driver: FakeDriver) -> None:
    with in_pipe(variables(fake_driver, TWO), "--seconds", "0", "--interval", "0.1") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = [process.stdout.readline() for _ in range(6)]  # comes while it runs
        process.send_signal(signal.SIGTERM)
        begun = process.stdout.readline()
        while re.match(r"\d\d:", begun):  # of two signals at once the second may be seen first
            begun = process.stdout.readline()
        process.send_signal(signal.SIGINT)  # which changes nothing any more
        rest, err = begun + process.stdout.read(), process.stderr.read()
        process.wait(timeout=20)
    assert (process.returncode, err) == (143, "")
    assert "".join(first[:4]) == (
        "Watching 2 GPUs and the host until Ctrl-C.\n"
        "GPU 0 NVIDIA H200, 140.5 GiB\n"
        "GPU 1 NVIDIA H200, 140.5 GiB\n"
        "GPU 0 is used by train (pid 4711, 5,120 MiB)\n"
    )
    assert first[4].startswith("GPU 1 does not offer sm_active_pct, ")
    figures = "gpu0 util 60 %, SM 60 %, memory 5.0/140.5 GiB, power 350/700 W, at 55 C; gpu1 "
    assert re.match(r"\d\d:\d\d:\d\d " + figures, first[5])
    assert "GPU 0 NVIDIA H200: utilisation 60 % on average: room left.\n" in rest
    assert "GPU 1 NVIDIA H200: utilisation 90 % on average: well used.\n" in rest
    assert not CONTROL.search("".join(first) + rest)


@pytest.mark.slow
def test_several_gpus_are_written_and_some_can_be_chosen(fake_driver: FakeDriver, tmp_path: Path) -> None:
    path, environ = tmp_path / "curves.csv", variables(fake_driver, TWO, CUDA_VISIBLE_DEVICES="0")
    with in_pipe(environ, "--seconds", "2", "--gpus", "1", "--csv", str(path)) as process:
        out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")
    assert out.startswith("Watching 1 GPU and the host for 2 s.\n")
    rows = rows_of(path)
    assert {row["gpu"] for row in rows} == {"1", "-1"}
    assert {row["util_pct"] for row in rows if row["gpu"] == "1"} - {""} == {"90"}  # the last has its energy alone
    times_s = [float(row["time_s"]) for row in rows]
    assert times_s == sorted(times_s)


@pytest.mark.slow
def test_watching_eight_gpus_costs_little_of_a_core(fake_driver: FakeDriver) -> None:
    eight = Scenario([h200(f"GPU-{number}") for number in range(8)])
    with in_pipe(variables(fake_driver, eight), "--seconds", "0") as process:
        assert process.stdout is not None
        while not re.match(r"\d\d:", process.stdout.readline()):
            pass
        watched, began_s = psutil.Process(process.pid), time.monotonic()
        before = watched.cpu_times()
        time.sleep(5)
        after, passed_s = watched.cpu_times(), time.monotonic() - began_s
    cpu_frac = (after.user + after.system - before.user - before.system) / passed_s
    assert cpu_frac < 0.1  # 0.006 was measured


@pytest.mark.slow
@has_terminals
@pytest.mark.parametrize("size", [(40, 12), (120, 30)], ids=str)
def test_in_a_terminal_a_table_is_drawn_over_and_the_summary_takes_its_place(
    fake_driver: FakeDriver, size: tuple[int, int]
) -> None:
    swinging = Scenario(
        [h200("GPU-1", util=Wave(2.0, 0.5, 10, 90), power_limit_w=700), FakeGpu("GPU-2", "evil \x1b[31mname", util=30)]
    )
    terminal = SmallTerminal([*COMMAND, "--seconds", "4"], variables(fake_driver, swinging), *size)
    terminal.until(lambda sent: re.search(r"[23] s of 4 s.*?\nhost CPU", sent, re.DOTALL))
    lines = terminal.screen()
    assert any(re.match(r"[23] s of 4 s", line) for line in lines)
    assert all(len(line) <= size[0] for line in lines)
    assert terminal.end() == 0
    assert "\x1b[31mname" not in terminal.sent
    lines = terminal.screen()
    assert not any(re.match(r"\d s of 4 s", line) for line in lines)
    assert any(line.startswith("Watched for 4.") for line in lines) or size[1] < 20
    assert any("GPU 0 NVIDIA H200: utilisation " in line for line in lines) or size[1] < 20


@pytest.mark.slow
@has_terminals
def test_ctrl_c_ends_it_and_the_terminal_is_as_before(fake_driver: FakeDriver) -> None:
    terminal = SmallTerminal([*COMMAND], variables(fake_driver, TWO, NO_COLOR="1"))
    terminal.until(lambda sent: re.search(r"[3-9] s, until Ctrl-C", sent))
    terminal.type("\x03")
    assert terminal.end() == 0
    assert any(line.startswith("GPU 1 NVIDIA H200: utilisation 90 %") for line in terminal.screen())
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", terminal.sent)


@pytest.mark.slow
@has_terminals
def test_in_the_background_it_draws_nothing_and_tells_the_end(fake_driver: FakeDriver) -> None:
    script = f"set -m; {sys.executable} -m wellfed monitor --seconds 2 & sleep 0.2; echo prompt; wait; echo code $?"
    terminal = SmallTerminal(["bash", "-c", script], variables(fake_driver, TWO))
    assert terminal.end() == 0
    assert "\x1b" not in terminal.sent
    assert "prompt" in terminal.sent
    assert "of 2 s" not in terminal.sent
    assert "GPU 1 NVIDIA H200: utilisation 90 % on average: well used." in terminal.sent
    assert "code 0" in terminal.sent
