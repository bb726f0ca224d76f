"""Tables of commands in terminals of several widths: no broken word, nothing lost, no colour where none is wanted."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.commands import ROOT
from tests.kit import made
from tests.kit.evidence_of import evidence
from tests.kit.few import slow
from tests.kit.small_terminal import SmallTerminal, has_terminals

COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-7]m")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a folder with two runs and a sweep."""
    for number, name in enumerate(("2026-01-01_00-00-00_aaaa", "2026-01-02_00-00-00_bbbb")):
        run = tmp_path / "logs" / "recsys" / "runs" / name
        run.mkdir(parents=True)
        overrides = ["gpu=24gb", f"seed={number}", "workload.effective_batch_size=512", "trainer.max_steps=600"]
        finding = {
            "id": "too_few_workers",
            "severity": "high",
            "message": "Waits.",
            "change": ["loader=auto"],
            "advice": "",
            "text": "",
        }
        more = {"evidence": {}, "changes_learning": False, "gain": None}
        found = evidence(
            wait_ms=2.0,
            compute_ms=8.0,
            ceiling=1.25,
            workload="recsys",
            overrides=overrides,
            findings=[{**finding, **more}],
        )
        found.record.write(run)
    made.write(tmp_path / "logs" / "recsys" / "sweeps" / "quick")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def environment(**more: str) -> dict[str, str]:
    ours = {"COLUMNS", "LINES", "NO_COLOR", "LC_ALL"}
    known = {name: value for name, value in os.environ.items() if name not in ours}
    return {**known, "PYTHONPATH": str(ROOT / "src"), "TERM": "xterm-256color", "LANG": "C", **more}


LEFT_OUT = {"metric", "typed", "workload.effective_batch_size=512", "trainer.max_steps=600"}
"""Heads of columns that are lines on a terminal, and overrides that a number stands for."""
COMMANDS = [
    ["runs"],
    slow(["leaderboard", "quick"]),
    slow(["report", "2026-01-01_00-00-00_aaaa", "2026-01-02_00-00-00_bbbb"]),
    slow(["diagnose", "2026-01-01_00-00-00_aaaa"]),
    slow(["doctor"]),
]


@has_terminals
@pytest.mark.parametrize("columns", [80, slow(160)])
@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_no_word_is_broken_or_lost(folder: Path, words: list[str], columns: int) -> None:
    command = [sys.executable, "-m", "wellfed", *words]
    piped = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True).stdout
    assert "\x1b" not in piped
    whole = {word.strip(",:") for word in piped.split()}
    terminal = SmallTerminal(command, environment(NO_COLOR="1"), columns=columns)
    assert terminal.end() == 0
    assert not COLOUR.search(terminal.sent)
    lines = terminal.screen()
    assert max(map(len, lines)) <= columns
    shown = {word.strip(",:") for line in lines for word in line.split()}
    memory = re.compile(r"\d+\.\d")  # available memory differs between two calls
    lost = {word for word in whole - shown if len(word) < columns - 4 and not memory.fullmatch(word)}
    assert lost <= LEFT_OUT


@has_terminals
def test_a_verdict_has_its_colour(folder: Path) -> None:
    terminal = SmallTerminal([sys.executable, "-m", "wellfed", "runs"], environment())
    assert terminal.end() == 0
    assert "\x1b[31mStarved\x1b[0m" in terminal.sent


@pytest.mark.slow
@has_terminals
def test_a_window_of_20_columns_shows_all(folder: Path) -> None:
    terminal = SmallTerminal([sys.executable, "-m", "wellfed", "runs"], environment(), columns=20)
    assert terminal.end() == 0
    text = "".join(terminal.screen()).replace(" ", "")
    for shown in ("2026-01-02_00-00-00_bbbb", "Starved", "ceiling80.0%", "typedgpu=24gb"):
        assert shown in text
