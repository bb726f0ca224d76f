"""Writes the record of `make faults`, and its table into docs/reliability.md."""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

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
    record = {"date": date.today().isoformat(), "minutes": minutes, "jobs": jobs, "rows": rows}
    lines = ",\n".join(json.dumps(row) for row in rows)
    head = json.dumps({**record, "rows": "ROWS"}, indent=1)
    path = RECORDS / f"{record['date']}_faults_cpu.json"
    path.write_text(head.replace('"ROWS"', f"[\n{lines}\n]") + "\n")
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_table(text, record), encoding="utf-8")


def latest() -> dict[str, Any]:
    """Returns the newest record."""
    found: dict[str, Any] = json.loads(sorted(RECORDS.glob("*_faults_cpu.json"))[-1].read_text())
    return found


def with_table(text: str, record: Mapping[str, Any]) -> str:
    """Returns the page with the table of a record."""
    tried = [row for row in record["rows"] if row[1] != "not tried"]
    survived = sum(row[1] == "yes" for row in tried)
    said = (
        f"{survived} of {len(tried)} faults were survived on {record['date']}, in {record['minutes']:g} minutes, "
        f"{record['jobs']} at a time. {len(record['rows']) - len(tried)} were not tried on that machine."
    )
    rows = [f"| {' | '.join('' if cell is None else str(cell) for cell in row)} |" for row in record["rows"]]
    table = "\n".join([BEGIN, "", said, "", *_HEAD, *rows, "", END])
    return re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: table, text, flags=re.DOTALL)


def _survived(case: Case) -> str:
    return "not tried" if case.skipped else "no" if case.faults else "yes"
