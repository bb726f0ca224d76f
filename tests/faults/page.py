"""Writes the records of `make faults`, `make kills` and `make fuzz`, and their tables into docs/reliability.md."""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.measuring import finish
from tests.faults.harness import Case

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "benchmarks" / "records"
PAGE = ROOT / "docs" / "reliability.md"
HEADS = {
    "faults": ("fault", "survived", "status", "exit code", "lost"),
    "kills": ("training", "kills", "resumes", "from a checkpoint", "in a restarted container", "as if undisturbed"),
    "fuzz": ("kind", "inputs", "refused", "slowest, s", "most memory, MiB", "fault"),
}
"""Columns of each table, by the make target that writes it."""


def write_faults(cases: Sequence[Case], minutes: float, jobs: int) -> None:
    """Writes the record of today and the table."""
    # Folders and times differ from run to run, so messages are not kept.
    rows = [[case.kind, _survived(case), case.status, case.code, case.lost] for case in cases]
    write("faults", rows, _says(rows), {"minutes": minutes, "jobs": jobs}, "make faults ARGS=--record")


def write(theme: str, rows: Sequence[Sequence[Any]], says: str, config: Mapping[str, Any], command: str) -> None:
    """Writes a record of today and its table, whose cells are in the order of `HEADS`."""
    path = RECORDS / f"{datetime.now(UTC):%Y-%m-%d}_{theme}_cpu.json"
    finish(theme, rows, says, path, config=config, command=command)
    text = with_table(PAGE.read_text(encoding="utf-8"), json.loads(path.read_text()))
    PAGE.write_text(text, encoding="utf-8")


def latest(theme: str) -> dict[str, Any]:
    """Returns the newest record."""
    found: dict[str, Any] = json.loads(max(RECORDS.glob(f"????-??-??_{theme}_cpu.json")).read_text())
    return found


def with_table(text: str, record: Mapping[str, Any]) -> str:
    """Returns the page with the table of a record."""
    config, theme = record["config"], record["theme"]
    at_a_time = f", {config['jobs']} {theme} at a time" if "jobs" in config else ""
    says = f"{record['says']} That took {config['minutes']:g} minutes{at_a_time} ({record['date']})."
    head, *rows = (
        f"| {' | '.join('' if cell is None else str(cell) for cell in row)} |"
        for row in (HEADS[theme], *record["results"])
    )
    begin, end = f"<!-- make {theme} -->", f"<!-- end of make {theme} -->"
    table = "\n".join([begin, "", says, "", head, f"|{'---|' * len(HEADS[theme])}", *rows, "", end])
    return re.sub(f"{re.escape(begin)}.*{re.escape(end)}", lambda _: table, text, flags=re.DOTALL)


def _says(rows: Sequence[Sequence[Any]]) -> str:
    tried = [row for row in rows if row[1] != "not tried"]
    survived = sum(row[1] == "yes" for row in tried)
    not_tried = f" {len(rows) - len(tried)} could not be planted on that machine." if len(tried) < len(rows) else ""
    return f"{survived} of {len(tried)} faults were survived.{not_tried}"


def _survived(case: Case) -> str:
    return "not tried" if case.skipped else "no" if case.faults else "yes"
