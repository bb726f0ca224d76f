"""Writes the record of `make faults`, and its table into docs/reliability.md."""

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
BEGIN, END = "<!-- make faults -->", "<!-- end of make faults -->"
_HEAD = ("| fault | survived | status | exit code | lost |", "|---|---|---|---|---|")


def write(cases: Sequence[Case], minutes: float, jobs: int) -> None:
    """Writes the record of today and the table."""
    # Folders and times differ from run to run, so messages are not kept.
    rows = [[case.kind, _survived(case), case.status, case.code, case.lost] for case in cases]
    path = RECORDS / f"{datetime.now(UTC):%Y-%m-%d}_faults_cpu.json"
    config = {"minutes": minutes, "jobs": jobs}
    finish("faults", rows, _says(rows), path, config=config, command="make faults ARGS=--record")
    text = with_table(PAGE.read_text(encoding="utf-8"), json.loads(path.read_text()))
    PAGE.write_text(text, encoding="utf-8")


def latest() -> dict[str, Any]:
    """Returns the newest record."""
    found: dict[str, Any] = json.loads(max(RECORDS.glob("????-??-??_faults_cpu.json")).read_text())
    return found


def with_table(text: str, record: Mapping[str, Any]) -> str:
    """Returns the page with the table of a record."""
    config = record["config"]
    took = f"That took {config['minutes']:g} minutes, {config['jobs']} faults at a time"
    says = f"{record['says']} {took} ({record['date']})."
    rows = [f"| {' | '.join('' if cell is None else str(cell) for cell in row)} |" for row in record["results"]]
    table = "\n".join([BEGIN, "", says, "", *_HEAD, *rows, "", END])
    return re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: table, text, flags=re.DOTALL)


def _says(rows: Sequence[Sequence[Any]]) -> str:
    tried = [row for row in rows if row[1] != "not tried"]
    survived = sum(row[1] == "yes" for row in tried)
    not_tried = f" {len(rows) - len(tried)} could not be planted on that machine." if len(tried) < len(rows) else ""
    return f"{survived} of {len(tried)} faults were survived.{not_tried}"


def _survived(case: Case) -> str:
    return "not tried" if case.skipped else "no" if case.faults else "yes"
