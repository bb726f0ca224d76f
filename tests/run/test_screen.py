from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from tests.plan.test_decide import config, planned
from wellfed.explain.diagnosis.finding import Finding
from wellfed.explain.report.run_lines import show_value
from wellfed.record import RunRecord
from wellfed.run import screen

SCRIPT = """
from wellfed.run.screen import Terminal
terminal = Terminal(width=80)
for line in range(20000):
    terminal.print("a line of the plan", line)
print("still here", file=__import__("sys").stderr)
"""
RECORD = RunRecord(
    "r",
    status="ok",
    steps=3,
    duration_s=2.0,
    ended_by="trainer.max_time_s=2",
    metrics={"train/loss": 0.25, "train/lr": 0.1},
    events=[{"kind": "metric_absent", "step": 1, "gpu": 0}, {"kind": "gpu_lost", "step": 2, "gpu": 1}],
    wandb={"id": "1", "mode": "offline", "path": "", "parts": ["logs/a b/wandb/offline-run-1"]},
)


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


def test_the_end_shows_where_metrics_began_and_only_files_that_are_there(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    console = Console(record=True, width=120, file=open(os.devnull, "w"))  # noqa: SIM115
    screen.show_end(console, RECORD, {"train/loss": 0.75, "train/lr": 0.1}, tmp_path)
    console.file.close()
    shown = console.export_text()
    assert "train/loss 0.25 (first 0.75)" in shown
    assert "train/lr 0.1\n" in shown
    assert "event gpu_lost: step=2, gpu=1" in shown
    assert "metric_absent" not in shown
    assert "wandb sync 'logs/a b/wandb/offline-run-1'" in shown
    assert "(run.json)" in shown
    assert "wandb leet" in shown
    assert "ok: 3 steps in 2.0 s, ended by trainer.max_time_s=2\n" in shown


@pytest.mark.parametrize(("name", "colour"), [("healthy", "32"), ("unknown", "35"), ("busy_machine", "33")])
def test_what_is_not_known_has_a_colour_of_its_own(tmp_path: Path, name: str, colour: str) -> None:
    told = Finding(name, "Words.", {}, is_note=True).entry()
    console = Console(record=True, width=120, force_terminal=True, highlight=False, file=open(os.devnull, "w"))  # noqa: SIM115
    screen.show_end(console, replace(RECORD, findings=[told]), {}, tmp_path)
    console.file.close()
    assert f"\x1b[{colour}m- {name} (info): Words.\x1b[0m" in console.export_text(styles=True)


def shown_at(width: int, *printed: object) -> list[str]:
    console = Console(record=True, width=width, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(*printed)
    console.file.close()
    return console.export_text().splitlines()


@pytest.mark.parametrize("with_source", [False, True])
def test_no_word_of_a_plan_is_cut_at_80_columns(with_source: bool) -> None:
    plan = planned(config())
    plan = replace(plan, trainer=replace(plan.trainer, strategy="early_stopping, lr_monitor"))
    lines = shown_at(80, screen.plan_table("recsys", plan, with_source=with_source))
    words = {word for line in lines for word in line.split()}
    assert max(map(len, lines)) <= 80
    assert set(plan.knobs) <= words
    for decided in plan.knobs.values():
        assert set(show_value(decided.value).split()) <= words
        assert set(decided.because.split()) <= words, decided.because


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
