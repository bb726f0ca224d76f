"""Records docs/screens.md anew: screens of a run and of the monitor in terminals of 80 x 24 and 160 x 50, as text.

    python tools/screens.py              # all of them
    python tools/screens.py --monitor    # the screens of the monitor alone

Each run is `COMMAND` on a simulated GPU, in this checkout; its folder is removed. `TRACE` keeps its files, so that
tests/every/test_screens.py holds its last screen to the code. README.md shows a part of it. Nothing is written if other
programs took the CPU, unless ``--anyway`` is typed. The monitor watches two runs, `WATCHED`, one after the other.
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
import textwrap
from pathlib import Path
from typing import Any

from recording import ROOT, last_screen, recorded, replaced

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
GUIDE, DIAGNOSIS = ROOT / "docs" / "my_gpu_is_at_20_percent.md", ROOT / "docs" / "diagnosis.md"
ON_GPU = ("starved_gpu_pictures", "workers_on_gpu_pictures")
"""Recorded runs on a real GPU whose figures `GUIDE` reads."""
WATCHED = ("loader=baseline", "loader=auto")
"""What the two runs beside the monitor differ in: the first is starved, the second is fed."""
_STARVED_FRAC = 0.4
"""Share of the monitor's time that the first of them trains."""
_SCALE = 5
"""Columns left of a curve, which has a column a second."""
_REDRAWN = re.compile(r"\r(?:\x1b\[2K(?:\x1b\[1A)?)+")
"""What the monitor sends before it draws its table again."""
_FED_S, _WAITED_S = 15, 45
"""Seconds of the second run on a screen of the monitor, and those that the runs may take to start."""
_RATE = re.compile(r" [\d,.]+ \S+/s")
_RUN_S = 900.0


def main(words: list[str]) -> int:
    """Records the page and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python tools/screens.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--anyway", action="store_true", help="also on a machine that other programs use")
    parser.add_argument("--monitor", action="store_true", help="the screens of the monitor alone")
    asked = parser.parse_args(words)
    texts = {f"{name}_monitor": monitor_screen(*size) for name, size in SIZES.items()}
    if asked.monitor:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(replaced(page, recorded(page) | texts), encoding="utf-8")
        write_examples()
        return 0
    traces: dict[str, Any] = {}
    for name, (columns, lines) in SIZES.items():
        folder, live, end = screens(columns, lines)
        texts |= {f"{name}_live": live, f"{name}_end": end}
        files = {each: (ROOT / folder / each).read_text(encoding="utf-8") for each in KEPT}
        files["run.json"] = json.dumps({**json.loads(files["run.json"]), **LEFT_OUT})
        shutil.rmtree(ROOT / folder)
        if "busy_machine" in files["run.json"] and not asked.anyway:
            print("Nothing is written: other programs took the CPU.", file=sys.stderr)
            return 1
        traces[name] = {"folder": folder, "files": files}
    TRACE.write_bytes(gzip.compress(json.dumps(traces).encode(), mtime=0))
    for page, shown in ((PAGE, texts), (README, {"end": in_short(texts["small_end"])})):
        page.write_text(replaced(page.read_text(encoding="utf-8"), shown), encoding="utf-8")
    write_examples()
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


def write_examples() -> None:
    """Writes the figures of recorded runs into the pages that explain them."""
    for page, shown in examples().items():
        page.write_text(replaced(page.read_text(encoding="utf-8"), shown), encoding="utf-8")


def examples() -> dict[Path, dict[str, str]]:
    """Returns what `GUIDE` and `DIAGNOSIS` show of recorded runs."""
    traces = ROOT / "tests" / "traces"
    files = json.loads(gzip.decompress(TRACE.read_bytes()))["small"]["files"]
    first = json.loads(files["run.json"])["findings"][0]
    finding = textwrap.fill(f"- {first['id']} ({first['severity']}): {first['text']}", 118)
    return {
        GUIDE: {name: figures_of(traces / "gpu" / f"{name}.json.gz") for name in ON_GPU},
        DIAGNOSIS: {"finding": finding},
    }


def figures_of(trace: Path) -> str:
    """Returns rate, shares of a step and device of a recorded run, as a last screen of 80 columns has them."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        folder.mkdir()
        for name, text in json.loads(gzip.decompress(trace.read_bytes()))["files"].items():
            (folder / name).write_text(text, encoding="utf-8")
        lines = last_screen(Path(scratch), "run").splitlines()
    first = next(place for place, line in enumerate(lines) if _RATE.match(line))
    last = next(place for place, line in enumerate(lines) if line.startswith(" GPU "))
    return "\n".join(lines[first : last + 1])


def monitor_screen(columns: int, lines: int) -> str:
    """Returns the table of `wellfed monitor` when its curves fill the window, beside two runs."""
    seconds = columns - _SCALE
    fixed = f"gpu={CARD} logger=none telemetry=none trainer.max_epochs=1000"
    frac = {WATCHED[0]: _STARVED_FRAC, WATCHED[1]: 1 - _STARVED_FRAC}
    words = [f"{word} trainer.max_time_s={frac[word] * seconds:.0f} {fixed}" for word in WATCHED]
    runs = "; ".join(f"python src/train.py {each}" for each in words)
    before = {*ROOT.glob("logs/recsys/runs/*")}
    with tempfile.TemporaryDirectory() as programs:
        watching = f"({runs}) > /dev/null 2>&1 & python -m wellfed monitor --for {seconds + _WAITED_S}s; wait"
        simulated = [sys.executable, "tools/simulated.py", CARD, "--", "bash", "-c", watching]
        variables = {**environment_of(ROOT, Path(programs)), "TERM": "xterm", "NO_COLOR": "1"}
        command = ["bash", "-c", f"cd {shlex.quote(str(ROOT))} && exec {shlex.join(simulated)}"]
        terminal = SmallTerminal(command, variables, columns, lines)
        terminal.until(
            lambda sent: sent.count("Curves: utilisation") > seconds and sent.count(WATCHED[1]) > _FED_S, _RUN_S
        )
        frame = _REDRAWN.split(terminal.sent)[-2]  # the last may be drawn in part
        terminal.end(_RUN_S)
    for folder in {*ROOT.glob("logs/recsys/runs/*")} - before:
        shutil.rmtree(folder)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", frame).splitlines()
    return "\n".join(line.rstrip() for line in _from(shown, r"\d+ (?:s|min).*Curves"))


def in_short(end: str) -> str:
    """Returns the verdict and the advice of a last screen."""
    lines = end.splitlines()
    first = next(place for place, line in enumerate(lines) if _RATE.match(line))
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
