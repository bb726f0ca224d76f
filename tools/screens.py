"""Records docs/screens.md anew: the screens of a run in terminals of 80 x 24 and 160 x 50, as text.

    python tools/screens.py

Each run is `COMMAND` on a simulated GPU, in this checkout; its folder is removed. `TRACE` keeps its files, so that
tests/every/test_screens.py holds its last screen to the code. README.md shows a part of it. Nothing is written if other
programs took the CPU, unless ``--anyway`` is typed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from recording import ROOT, replaced

from tests.every.test_readme import environment_of
from tests.kit.small_terminal import SmallTerminal

PAGE, README = ROOT / "docs" / "screens.md", ROOT / "README.md"
TRACE = ROOT / "tests" / "traces" / "screens.json.gz"
CARD = "24gb"
COMMAND = ("python", "src/train.py", "loader=baseline", f"gpu={CARD}", "trainer.max_steps=120", "logger=none")
SIZES = {"small": (80, 24), "large": (160, 50)}
"""Columns and lines of the terminals, by the beginning of the names of their blocks."""
KEPT = ("run.json", "steps.csv", "metrics.csv", "telemetry.csv")
LEFT_OUT = {"git": None, "engine": None, "host_name": "", "boot_id": ""}
"""Entries of run.json that are of the recording machine."""
LIVE = re.compile(r"(?:[6-9]\d|1[01]\d)/120 \d.*?train/loss .*? W\b", re.DOTALL)
"""Bar in the second half of the run, and the figures below it."""
_RUN_S = 900.0


def main(words: list[str]) -> int:
    """Records the page and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python tools/screens.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--anyway", action="store_true", help="also on a machine that other programs use")
    is_any = parser.parse_args(words).anyway
    texts: dict[str, str] = {}
    traces: dict[str, Any] = {}
    for name, (columns, lines) in SIZES.items():
        folder, live, end = screens(columns, lines)
        texts |= {f"{name}_live": live, f"{name}_end": end}
        files = {each: (ROOT / folder / each).read_text(encoding="utf-8") for each in KEPT}
        files["run.json"] = json.dumps({**json.loads(files["run.json"]), **LEFT_OUT})
        shutil.rmtree(ROOT / folder)
        if "busy_machine" in files["run.json"] and not is_any:
            print("Nothing is written: other programs took the CPU.", file=sys.stderr)
            return 1
        traces[name] = {"folder": folder, "files": files}
    TRACE.write_bytes(gzip.compress(json.dumps(traces).encode(), mtime=0))
    for page, shown in ((PAGE, texts), (README, {"end": in_short(texts["small_end"])})):
        page.write_text(replaced(page.read_text(encoding="utf-8"), shown), encoding="utf-8")
    print(f"Recorded: {PAGE.relative_to(ROOT)}, {README.name}, {TRACE.relative_to(ROOT)}")
    return 0


def screens(columns: int, lines: int) -> tuple[str, str, str]:
    """Returns the folder of a run, what a terminal shows while it trains, and its last screen."""
    simulated = [sys.executable, "tools/simulated.py", CARD, "--", *COMMAND]
    command = ["bash", "-c", f"cd {shlex.quote(str(ROOT))} && exec {shlex.join(simulated)}"]
    with tempfile.TemporaryDirectory() as programs:
        variables = {**environment_of(ROOT, Path(programs)), "TERM": "xterm", "NO_COLOR": "1"}
        terminal = SmallTerminal(command, variables, columns, lines)
        terminal.until(LIVE.search, _RUN_S)
        live = _from(terminal.screen(), r"recsys +")[-lines:]
        code = terminal.end(_RUN_S)
        end = terminal.screen()
    if code:
        raise SystemExit("\n".join(end))
    folder = next(line.split()[1] for line in live if line.startswith("folder "))
    return folder, "\n".join(live), "\n".join(_from(end, r" [A-Z][A-Z -]+  "))


def in_short(end: str) -> str:
    """Returns the verdict and the advice of a last screen."""
    lines = end.splitlines()
    first = next(place for place, line in enumerate(lines) if re.match(r" [\d,.]+ \S+/s", line))
    advice = next(place for place, line in enumerate(lines) if line.startswith(" Try"))
    after = next(place for place, line in enumerate(lines) if place > advice and not line.startswith("   "))
    return "\n".join([*lines[:first], *lines[advice:after]])


def _from(lines: list[str], begins: str) -> list[str]:
    """Returns the lines from the first one that begins so, without empty ones at their end."""
    first = next(place for place, line in enumerate(lines) if re.match(begins, line))
    found = lines[first:]
    while found and not found[-1]:
        found.pop()
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
