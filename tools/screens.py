"""Records docs/screens.md anew: the screens of a run in terminals of 80 x 24 and 160 x 50, as text.

    python tools/screens.py

Each run is `COMMAND` on a simulated GPU, in a copy of the project. `TRACE` keeps its files, so that
tests/every/test_screens.py holds its last screen to the code.
"""

from __future__ import annotations

import gzip
import json
import re
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from recording import ROOT, replaced

from tests.every.test_readme import copy_of_project, environment_of
from tests.kit.small_terminal import SmallTerminal

PAGE = ROOT / "docs" / "screens.md"
TRACE = ROOT / "tests" / "traces" / "screens.json.gz"
CARD = "24gb"
COMMAND = ("python", "src/train.py", "loader=baseline", f"gpu={CARD}", "trainer.max_steps=60", "logger=none")
SIZES = {"small": (80, 24), "large": (160, 50)}
"""Columns and lines of the terminals, by the beginning of the names of their blocks."""
KEPT = ("run.json", "steps.csv", "metrics.csv", "telemetry.csv")
LIVE = re.compile(r"(?:4\d|5\d)/60 \d.*? W\b", re.DOTALL)
"""Bar in the last third of the run, and the line of figures below it."""
_RUN_S = 900.0


def main() -> int:
    """Records the page and returns the exit code."""
    texts: dict[str, str] = {}
    traces: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        project = copy_of_project(Path(scratch) / "project")
        for name, (columns, lines) in SIZES.items():
            texts[f"{name}_live"], texts[f"{name}_end"] = screens(project, columns, lines)
            folder = re.findall(r"^folder +(\S+)$", texts[f"{name}_live"], re.MULTILINE)[0]
            files = {each: (project / folder / each).read_text(encoding="utf-8") for each in KEPT}
            traces[name] = {"folder": folder, "files": files}
    TRACE.write_bytes(gzip.compress(json.dumps(traces).encode(), mtime=0))
    PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), texts), encoding="utf-8")
    print(f"Recorded: {PAGE.relative_to(ROOT)}, {TRACE.relative_to(ROOT)}")
    return 0


def screens(project: Path, columns: int, lines: int) -> tuple[str, str]:
    """Returns what a terminal shows while the run trains, and its last screen."""
    simulated = [sys.executable, str(project / "tools" / "simulated.py"), CARD, "--", *COMMAND]
    command = ["bash", "-c", f"cd {shlex.quote(str(project))} && exec {shlex.join(simulated)}"]
    terminal = SmallTerminal(command, {**environment_of(project), "TERM": "xterm", "NO_COLOR": "1"}, columns, lines)
    terminal.until(LIVE.search, _RUN_S)
    live = _from(terminal.screen(), r"recsys +")[-lines:]
    code = terminal.end(_RUN_S)
    end = terminal.screen()
    if code:
        raise SystemExit("\n".join(end))
    return "\n".join(live), "\n".join(_from(end, r" [A-Z][A-Z -]+  "))


def _from(lines: list[str], begins: str) -> list[str]:
    """Returns the lines from the last one that begins so, without empty ones at their end."""
    first = max(place for place, line in enumerate(lines) if re.match(begins, line))
    found = lines[first:]
    while found and not found[-1]:
        found.pop()
    return found


if __name__ == "__main__":
    sys.exit(main())
