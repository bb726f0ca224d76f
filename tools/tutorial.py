"""Records docs/tutorial.md anew: types its commands in a copy of the project, and puts figures and pictures in.

    python tools/tutorial.py      # ten minutes, on a machine that does nothing else

Nothing is written if the figures contradict each other or the page, as on a busy machine. What the page shows is also
in docs/images/tutorial.json, to which tests/every/test_tutorial.py holds it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pictures
from recording import ROOT, last_screen, replaced, typed

from tests.every.test_pages import write
from tests.every.test_readme import blocks, copy_of_project
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.report.last_screen import Screen
from wellfed.record import RunRecord

PAGE = ROOT / "docs" / "tutorial.md"
RECORD = pictures.IMAGES / "tutorial.json"
STARVED, FED = "logs/photos/runs/starved", "logs/photos/runs/fed"
COMPARED = "logs/comparison_starved_fed.html"
SIZES = {"tutorial": (1280, 760, ""), "compared": (1280, 760, "")}
"""Width and height of the pictures of the starved run's page, and of both side by side."""
CAUSE = "loading_in_main_process"
BUSY = ", which other programs used at the same time: rates and ceilings mean nothing"
LEAST_GAIN = 2.0
"""Times the rate that the page promises at least."""


def main(words: Sequence[str]) -> int:
    """Records the page and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python tools/tutorial.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--anyway", action="store_true", help="write figures that contradict each other, too")
    is_any = parser.parse_args(words).anyway
    browser = pictures.browser()
    if browser is None:
        return 2
    page = PAGE.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as scratch:
        project = copy_of_project(Path(scratch) / "project")
        texts = record(page, project)
        starved, fed = (RunRecord.read(project / folder) for folder in (STARVED, FED))
        if faults := [*contradictions(starved, fed, texts["tuned"])]:
            print(*faults, "Is the machine idle?", sep="\n", file=sys.stderr)
            if not is_any:
                return 1
        from_run = {"tutorial": (project / STARVED / "report.html"), "compared": project / COMPARED}
        for name, path in from_run.items():
            for theme in ("light", "dark"):
                shot = pictures.picture(
                    browser, path.read_text(encoding="utf-8"), Path(scratch), SIZES[name], is_dark=theme == "dark"
                )
                (pictures.IMAGES / f"{name}-{theme}.png").write_bytes(shot)
        shown = {
            "machine": texts["machine"],
            "date": starved.started_at[:10],
            "starved": figures(starved),
            "fed": figures(fed),
            "headings": {name: pictures.headings(path.read_text(encoding="utf-8")) for name, path in from_run.items()},
        }
    PAGE.write_text(replaced(page, texts), encoding="utf-8")
    RECORD.write_text(json.dumps(shown, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"Recorded: {PAGE.relative_to(ROOT)}, its pictures, {RECORD.relative_to(ROOT)}")
    return 0


def record(page: str, project: Path) -> dict[str, str]:
    """Types the page's commands, each with what the run before it has named, and returns the texts of its blocks."""
    texts: dict[str, str] = {}
    for block in blocks(page):
        if block.path:
            write(block, project)
        elif block.language == "bash":
            command = block.text
            if FED in command:
                command = texts["typed"] = fed_command(RunRecord.read(project / STARVED))
            printed = typed(command, project)
            if "wellfed report" in command:
                texts["compared"] = compared_lines(printed)
            elif "tune.py" in command:
                texts["tuned"] = tuned_lines(printed)
    return {
        "machine": machine_of(project),
        "starved": last_screen(project, STARVED),
        "fed": last_screen(project, FED),
        **texts,
    }


def machine_of(project: Path) -> str:
    """Returns the machine, and whether it was busy."""
    runs = [Evidence.read(project / folder) for folder in (STARVED, FED)]
    busy = any(run.record.findings[0]["id"] == "busy_machine" for run in runs)
    return f"{pictures.machine_of(runs[0])}{BUSY if busy else ''}"


def fed_command(starved: RunRecord) -> str:
    """Returns the command of the starved run with the override that it named, as a terminal of 80 columns wraps it."""
    (cause,) = (one for one in starved.findings if one["id"] == CAUSE)
    kept = [one for one in starved.overrides if not one.startswith("hydra.run.dir=")]
    words = ["python", "src/train.py", *kept, *cause["change"], f"hydra.run.dir={FED}"]
    return "\n".join(line.plain for line in Screen(118).shell(words, "")) + "\n"


def compared_lines(printed: str) -> str:
    """Returns the lines of the comparison that the page shows: verdict, losses, and what differs."""
    lines = printed.splitlines()
    verdict = next(line for line in lines if " times as fast as " in line or "not told apart" in line)
    loss = next(line for line in lines if line.startswith("test/loss"))
    differs = lines[next(place for place, line in enumerate(lines) if line.startswith("differs")) :]
    plan = [line for line in differs if line.startswith(("differs", "loader."))]
    return "\n".join([verdict, "...", loss, "...", *plan])


def tuned_lines(printed: str) -> str:
    """Returns the last lines of the tune, from its result on."""
    lines = printed.splitlines()
    first = next(place for place, line in enumerate(lines) if line.startswith("Start and result"))
    return "\n".join(lines[first:])


def figures(record: RunRecord) -> dict[str, Any]:
    """Returns the figures of a run that the page shows."""
    assert record.throughput is not None
    assert record.time is not None
    return {
        "samples_per_s": record.throughput["samples_per_s"],
        "ceiling": record.ceiling and record.ceiling["samples_per_s"],
        "wait_frac": record.time["wait_frac"],
        "finding": record.findings[0]["id"],
    }


def contradictions(starved: RunRecord, fed: RunRecord, tuned: str) -> Iterator[str]:
    """Yields what the page must not show."""
    if (first := starved.findings[0]["id"]) != CAUSE:
        yield f"the starved run was found to be {first}, not {CAUSE}."
    before, after = figures(starved), figures(fed)
    if after["samples_per_s"] < LEAST_GAIN * before["samples_per_s"]:
        yield f"the fed run has {after['samples_per_s'] / before['samples_per_s']:.1f} times the rate."
    for name, one in (("starved", before), ("fed", after)):
        if one["ceiling"] is None:
            yield f"the {name} run has no ceiling."
        elif after["samples_per_s"] > one["ceiling"]:
            rates = f"{after['samples_per_s']:,.0f}/s, exceeds the {name} run's ceiling, {one['ceiling']:,.0f}/s"
            yield f"the fed run, {rates}."
    if not re.search(r"beyond noise\.", tuned):
        yield "tune has found nothing beyond the noise."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
