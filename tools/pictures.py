"""Draws the pictures of README and documentation from a real run, in Chromium, light and dark.

    python tools/pictures.py            # makes the run on a simulated GPU, then draws
    python tools/pictures.py RUN        # draws a run folder, or a run of tests/traces/

    python tools/pictures.py --boards   # draws the leaderboard of `SWEEP` and the comparison of `COMPARED`

A page is drawn anew from the files of the run. docs/images/pictures.json records what they show: where the run
is from, the machine, the verdict.
"""

from __future__ import annotations

import argparse
import gzip
import html
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import word_of
from wellfed.explain.diagnosis.run_rules import conclude
from wellfed.explain.report.comparison import Comparison
from wellfed.explain.report.comparison_page import comparison_html
from wellfed.explain.report.run_page import to_html
from wellfed.study.board import files
from wellfed.study.ranking.ranking import board_of

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
RECORD = IMAGES / "pictures.json"
CARD = "24gb"
COMMAND = ("src/train.py", "workload=recsys", "loader=baseline", f"gpu={CARD}", "trainer.max_steps=120", "logger=none")
SIZES = {"page": (1280, 1340, ""), "phone": (390, 1100, "")}
"""Width and height in pixels, and the part of the page, by name."""
BOARDS = {"board": (1280, 510, ("board",)), "phones": (390, 900, ("board", "compared"))}
"""Width and height of each page in pixels, and the pages side by side, by name."""
SWEEP = ROOT / "tests" / "traces" / "board.json.gz"
COMPARED = tuple(
    ROOT / "tests" / "traces" / "gpu" / f"{name}_gpu_pictures.json.gz" for name in ("accumulated_on", "on")
)
MOST_BYTES = 150_000
_COLOURS = (255, 128, 64)
"""Sizes of a palette; the first whose file is small enough is taken."""
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_MARGIN = 40


def main(words: list[str]) -> int:
    """Draws all pictures, writes their record, and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python tools/pictures.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", nargs="?", type=Path, help="run folder or trace to draw (default: makes a run)")
    parser.add_argument("--boards", action="store_true", help="draw leaderboard and comparison instead")
    asked = parser.parse_args(words)
    program = browser()
    if program is None:
        return 2
    if asked.boards:
        return draw_boards(program)
    with tempfile.TemporaryDirectory() as scratch:
        folder = folder_of(asked.run, Path(scratch)) if asked.run else made(Path(scratch))
        evidence = Evidence.read(folder)
        conclude(evidence)
        busy = next((one for one in evidence.record.findings if one["id"] == "busy_machine"), None)
        if busy is not None:
            print(f"Nothing is drawn. {busy['message']}", file=sys.stderr)
            return 1
        page = to_html(evidence, folder)
        keep(
            {
                f"{name}-{theme}.png": picture(program, page, Path(scratch), size, is_dark=theme == "dark")
                for name, size in SIZES.items()
                for theme in ("light", "dark")
            }
        )
    source = asked.run.as_posix() if asked.run and asked.run.is_file() else None
    RECORD.write_text(
        json.dumps(what_is_shown(evidence, page, source), indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    return 0


def keep(drawn: dict[str, bytes]) -> None:
    """Writes pictures by name."""
    IMAGES.mkdir(exist_ok=True)
    for name, content in drawn.items():
        (IMAGES / name).write_bytes(content)
        print(f"{(IMAGES / name).relative_to(ROOT)}: {len(content) / 1000:.0f} kB")


def draw_boards(program: str) -> int:
    """Draws the leaderboard and the comparison, and returns the exit code."""
    with tempfile.TemporaryDirectory() as scratch:
        pages = boards(Path(scratch))
        keep(
            {
                f"{name}-{theme}.png": frames(
                    program, [pages[page] for page in shown], Path(scratch), (wide, high, ""), is_dark=theme == "dark"
                )
                for name, (wide, high, shown) in BOARDS.items()
                for theme in ("light", "dark")
            }
        )
    return 0


def boards(scratch: Path) -> dict[str, str]:
    """Returns the pages of the recorded sweep and of two recorded runs."""
    a, b = (Evidence.read(folder_of(run, scratch / str(number))) for number, run in enumerate(COMPARED))
    for run in (a, b):
        if run.record.time is not None:
            run.record.time["step_ms_mean"] = run.steps.mean_ms or 0.0  # younger than the recorded runs
        conclude(run)
    sweep = files.to_html(board_of(folder_of(SWEEP, scratch / "sweep")))
    return {"board": sweep, "compared": comparison_html(Comparison(a, b))}


def browser() -> str | None:
    """Returns the browser that draws; None, with a message on stderr, if there is none."""
    found = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if found is None:
        print(f"needs {' or '.join(_BROWSERS)}: apt-get install chromium", file=sys.stderr)
    return found


def made(scratch: Path) -> Path:
    """Makes a run and returns its folder."""
    command = [sys.executable, "tools/simulated.py", CARD, "--", sys.executable, *COMMAND]
    subprocess.run([*command, f"paths.log_dir={scratch / 'logs'}"], cwd=ROOT, check=True)
    (folder,) = (scratch / "logs").glob("*/runs/*")
    return folder


def folder_of(run: Path, scratch: Path) -> Path:
    """Returns a run folder; a trace is unpacked into one."""
    if run.is_dir():
        return run
    folder = scratch / "run"
    folder.mkdir(parents=True)
    for name, content in json.loads(gzip.decompress(run.read_bytes()))["files"].items():
        (folder / name).write_text(content, encoding="utf-8")
    return folder


def what_is_shown(evidence: Evidence, page: str, source: str | None) -> dict[str, Any]:
    """Returns the facts of the run that the pictures' captions name, and the headings of the page.

    Args:
        source: file of the trace; None = the run was started by the command in its record.
    """
    record = evidence.record
    first = record.findings[0]
    return {
        "from": source or shlex.join(["python", "src/train.py", *(_without_paths(record.overrides))]),
        "machine": machine_of(evidence),
        "date": record.started_at[:10],
        "verdict": word_of(first),
        "finding": first["id"],
        "steps": record.steps,
        "headings": headings(page),
    }


def machine_of(evidence: Evidence) -> str:
    """Returns the GPUs that a run has used, and the cores."""
    machine = evidence.record.machine
    gpus = [gpu.get("name", "") for gpu in machine.get("gpus", []) if evidence.on_gpu]
    return ", ".join([*gpus, f"{machine.get('cpu_quota_cores', 0):.3g} cores of {machine.get('cpu', 'a CPU')}"])


def headings(page: str) -> list[str]:
    """Returns the headings of a page."""
    return [html.unescape(re.sub(r"<.*", "", found)).strip() for found in re.findall(r"<h2>(.*?)</h2>", page)]


def _without_paths(overrides: list[str]) -> list[str]:
    """Returns the overrides without those that name folders of the machine."""
    return [each for each in overrides if not each.startswith("paths.") and os.sep not in each]


def picture(browser: str, page: str, scratch: Path, size: tuple[int, int, str], *, is_dark: bool) -> bytes:
    """Returns a part of the page as PNG."""
    return frames(browser, [page], scratch, size, is_dark=is_dark)


def frames(browser: str, pages: list[str], scratch: Path, size: tuple[int, int, str], *, is_dark: bool) -> bytes:
    """Returns pages side by side as PNG. A window can't be as narrow as a phone, a frame can."""
    wide, high, anchor = size
    shown = ""
    for number, page in enumerate(pages):
        (scratch / f"page{number}.html").write_text(page, encoding="utf-8")
        style = f"border:0;width:{wide}px;height:{high}px;float:left"
        shown += f'<iframe src=page{number}.html{anchor} scrolling=no style="{style}"></iframe>'
    (scratch / "frame.html").write_text(f'<!doctype html><body style="margin:0">{shown}</body>')
    wide *= len(pages)
    shot = scratch / "shot.png"
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={scratch / 'profile'}"]
    command += ["--virtual-time-budget=60000", f"--window-size={max(wide, 600) + _MARGIN},{high + _MARGIN}"]
    command += [f"--blink-settings=preferredColorScheme={0 if is_dark else 1}", f"--screenshot={shot}"]
    subprocess.run([*command, (scratch / "frame.html").as_uri()], check=True, capture_output=True, timeout=120)
    with Image.open(shot) as image:
        cut = image.convert("RGB").crop((0, 0, wide, high))
    for colours in _COLOURS:
        content = io.BytesIO()
        cut.quantize(colours, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(content, "PNG", optimize=True)
        if len(content.getvalue()) < MOST_BYTES:
            return content.getvalue()
    raise ValueError(f"a picture of {wide} x {high} pixels has {len(content.getvalue())} bytes, at most {MOST_BYTES}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
