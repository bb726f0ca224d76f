"""Runs scripts under ``wellfed watch``, and reads what they leave."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.end_to_end.commands import environment, run
from tests.fake_cuda.machine import Cards, machine_environment
from tests.fake_nvml.driver import FakeDriver
from wellfed.record.entries import RunRecord

SCRIPTS = Path(__file__).with_name("scripts")
WATCH = ("-m", "wellfed", "watch")


def ended(*command: str | Path, cwd: Path, fresh: bool = False, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments to its end, in a copy of one that has imported torch already.

    Args:
        fresh: whether it is a Python of its own: for what an import of torch or a traceback shows.
    """
    words = [*map(str, command)]
    if fresh:
        return subprocess.run(
            [sys.executable, *words], cwd=cwd, env=environment(**more), capture_output=True, text=True, timeout=300
        )
    script = words[0] if words[0] == "-m" else cwd / words[0]
    done = run(script, *words[1:], cwd=cwd, **more)
    return subprocess.CompletedProcess(words, done.code, done.out, done.err)


def watched(code: str, cwd: Path, **more: str) -> RunRecord:
    """Runs code as a script under the watch, and returns the record."""
    (cwd / "train.py").write_text(code)
    done = ended(*WATCH, "train.py", cwd=cwd, **more)
    assert done.returncode == 0, done.stderr
    return record_of(cwd)


def alone_and_watched(code: str, cwd: Path, **more: str) -> tuple[Any, Any]:
    """Runs code as a script without and with the watch."""
    (cwd / "train.py").write_text(code)
    return ended("train.py", cwd=cwd, **more), ended(*WATCH, "train.py", cwd=cwd, **more)


def folder_of(cwd: Path) -> Path:
    (found,) = (cwd / "logs" / "watch" / "runs").iterdir()
    return found


def record_of(cwd: Path) -> RunRecord:
    return RunRecord.read(folder_of(cwd))


def rows_of(cwd: Path) -> list[dict[str, str]]:
    with (folder_of(cwd) / "steps.csv").open() as stream:
        return list(csv.DictReader(stream))


def findings_of(record: RunRecord) -> list[str]:
    """Without the remark that the tests' machine is shared."""
    return [finding["id"] for finding in record.findings if finding["id"] != "busy_machine"]


def notes_of(record: RunRecord) -> list[str]:
    return [event["message"] for event in record.events if event["kind"] == "unseen"]


def on_card(folder: Path, fake_driver: FakeDriver, **cards: Any) -> dict[str, str]:
    return machine_environment(fake_driver, folder, Cards(mib=2048, **cards))
