"""Helpers of the scripts that type a page's commands in a copy of the project, and put what they saw into the page.

A block of a page that follows a comment ``<!-- recorded: NAME -->`` is recorded.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.report.last_screen import Screen, last_lines

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.every.test_readme import run  # noqa: E402

_RECORDED = re.compile(r"(<!-- recorded: (\w+) -->\n```\w+\n)(.*?)(^```$)", re.MULTILINE | re.DOTALL)
COLUMNS = 80
"""Width of the terminal whose lines a page shows."""


def recorded(page: str) -> dict[str, str]:
    """Returns the recorded blocks of a page by name."""
    return {name: text for _, name, text, _ in _RECORDED.findall(page)}


def replaced(page: str, texts: dict[str, str]) -> str:
    """Returns the page with new texts in its recorded blocks, each of which must have one."""
    assert recorded(page).keys() == texts.keys(), (recorded(page).keys(), texts.keys())
    return _RECORDED.sub(lambda found: f"{found[1]}{texts[found[2]].rstrip()}\n{found[4]}", page)


def typed(command: str, project: Path, timeout_s: float = 1800) -> str:
    """Types a command in the copy and returns what it printed, with paths below the copy as relative ones.

    Raises:
        SystemExit: the command failed.
    """
    print(f"$ {command.strip()}", flush=True)
    done = run(command, project, timeout_s=timeout_s)
    if done.returncode:
        raise SystemExit(f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout.replace(f"{project}/", "")


def last_screen(project: Path, folder: str, columns: int = COLUMNS) -> str:
    """Returns the last screen of a run, by its folder within the project, as `src/train.py` has printed it."""
    return "\n".join(_lines(project, folder, columns))


def _lines(project: Path, folder: str, columns: int) -> Iterator[str]:
    with contextlib.chdir(project), patch.object(sys, "argv", ["src/train.py"]):
        for line in last_lines(Evidence.read(Path(folder)), Path(folder), Screen(columns)):
            yield line.plain.rstrip()
