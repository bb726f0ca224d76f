import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tests.kit.evidence_of import evidence
from tests.kit.small_terminal import has_terminals
from tests.plan.test_decide import config, planned
from wellfed.plan.run_plan import RunPlan
from wellfed.record.entries import FindingEntry
from wellfed.run import screen

SCRIPT = """
from wellfed.run.screen import Terminal
terminal = Terminal(width=80)
for line in range(20000):
    terminal.print("a line of the plan", line)
print("still here", file=__import__("sys").stderr)
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}


@pytest.mark.slow
def test_a_reader_that_goes_away_does_not_end_the_process() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    with process.stderr:
        told = process.stderr.read()
    assert (process.wait(timeout=60), told) == (0, "still here\n")


@pytest.mark.slow
def test_a_full_disk_does_not_end_the_process() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment(), text=True, stdout=full, stderr=subprocess.PIPE
        )
    assert (done.returncode, done.stderr) == (0, "still here\n")


def test_no_text_reaches_the_terminal_as_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b[31m\x9b2J\x07\r[bold]:smile:\x7f"
    table = Table(title=evil)
    table.add_column(evil)
    table.add_row(evil)
    terminal = screen.Terminal(width=200)
    terminal.print(evil, soft_wrap=True)
    terminal.print(table)
    told = capsys.readouterr().out
    assert told.count("\\x1b[31m\\x9b2J\\x07\\r[bold]:smile:\\x7f") == 4
    assert not set(told) & set("\x1b\x9b\x07\r\x7f")
    terminal.show_json({"text": evil, "figure": float("nan")})
    told = capsys.readouterr().out
    assert not set(told) & set("\x1b\x9b\x07\r\x7f")
    assert json.loads(told) == {"text": evil, "figure": None}


def in_a_terminal(job: Callable[[screen.Terminal], None], *, columns: int = 80, **options: Any) -> str:
    """Returns what a pseudo-terminal gets."""
    ours, theirs = os.openpty()
    with open(theirs, "w", encoding=options.pop("encoding", "utf-8")) as stream:
        job(screen.Terminal(file=stream, force_terminal=True, width=columns, **options))
    got = b""
    with suppress(OSError):  # how Linux reports that the other end is closed
        while part := os.read(ours, 65536):
            got += part
    os.close(ours)
    return got.decode(errors="replace")


def start(console: screen.Terminal, plan: RunPlan, folder: Path) -> None:
    screen.show_start(console, "recsys", None)
    screen.show_plan(console, "recsys", plan, ["854 users, 524 items", "2 files can't be read."], 17346)
    console.print(f"folder  {folder}", soft_wrap=True)


def lines_of(sent: str) -> list[str]:
    """Returns the lines that stay in a terminal."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", re.sub(r"\x1b\]8;[^\\]*\\", "", sent))
    return [line.rpartition("\r")[2] for line in plain.replace("\r\n", "\n").removesuffix("\n").split("\n")]


@has_terminals
def test_the_start_takes_six_lines_of_a_terminal() -> None:
    plan = planned(config())
    sent = in_a_terminal(lambda console: start(console, plan, Path("logs/recsys/runs/a")))
    first, *lines = lines_of(sent)
    assert first == "Training recsys: importing PyTorch, reading data, planning ..."
    assert [line.split(maxsplit=1)[0] for line in lines] == ["recsys", "batch", "loader", "data", "folder"]
    assert max(map(len, lines)) <= 80
    assert plan.device.name in lines[0]
    assert f"budget {plan.device.memory_gib:.1f} GiB" in lines[0]
    assert plan.device.precision in lines[0]
    assert f"{plan.workload.effective_batch_size} samples a step" in lines[1]
    assert "no workers" in lines[2]
    assert lines[3] == "data    854 users, 524 items. 2 files can't be read"
    assert lines[4] == "folder  logs/recsys/runs/a"


@has_terminals
def test_a_terminal_that_is_gone_ends_nothing() -> None:
    ours, theirs = os.openpty()
    stream = os.fdopen(theirs, "w")
    console = screen.Terminal(file=stream, force_terminal=True, width=80)
    live = Live(console=console, auto_refresh=False)
    live.start()
    os.close(ours)
    live.update(Text("step 1"), refresh=True)
    live.stop()
    assert console.quiet
    assert isinstance(console.failure, OSError)
    with suppress(OSError):
        stream.close()


def test_a_file_gets_whole_lines() -> None:
    plan, stream = planned(config()), io.StringIO()
    start(screen.Terminal(file=stream), plan, Path("logs/recsys/runs/a"))
    first, *lines = stream.getvalue().splitlines()
    assert first == "Training recsys: importing PyTorch, reading data, planning ..."
    assert len(lines) == 5
    assert lines[2].endswith(plan.loader.reasons["backend"].because)
    assert "\x1b" not in stream.getvalue()


def test_only_a_terminal_gets_links_and_colours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "report.html").touch()
    found = evidence(wait_ms=90.0, ceiling=10.0, findings=[STARVED])

    def end(console: screen.Terminal) -> None:
        screen.show_end(console, found, tmp_path)

    sent = in_a_terminal(end)
    assert f"file://{quote(str(tmp_path))}/report.html\x1b\\" in sent
    assert "\x1b[1;31mSTARVED\x1b[0m" in sent
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", in_a_terminal(end))
    stream = io.StringIO()
    end(screen.Terminal(file=stream))
    assert "\x1b" not in stream.getvalue()
    assert f"\n Report   {tmp_path}/report.html\n" in stream.getvalue()


STARVED: FindingEntry = {
    "id": "loading_in_main_process",
    "severity": "high",
    "message": "90 % of each step waits for data.",
    "advice": "",
    "evidence": {},
    "change": ["loader=auto"],
    "changes_learning": False,
    "gain": None,
    "text": "90 % of each step waits for data. Try: loader=auto.",
}
