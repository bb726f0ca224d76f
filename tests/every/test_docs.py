"""The pages under docs/ against the code: keys, events and columns of a run's files, pages of findings, links."""

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest

from wellfed import errors
from wellfed.observe.loggers import journal
from wellfed.observe.telemetry import metrics
from wellfed.record.entries import EventKind, RunRecord

ROOT = Path(__file__).parents[2]
CONTRACT = ("workloads", "data_loaders", "streams", "features", "evaluation", "callbacks")
"""Pages that describe what a workload offers."""


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def first_cells(name: str, head: str) -> list[str]:
    """Returns the names in the first column of a page's tables that are headed so."""
    found = re.findall(rf"^\| {head} \|.*\n\|[-|]+\n((?:\|.*\n?)+)", page(name), flags=re.MULTILINE)
    assert found, f"{name} has no table of {head}"
    lines = [line for rows in found for line in rows.splitlines()]
    return [name for line in lines for name in re.findall(r"`([\w.]+)`", line.split("|")[1])]


def test_every_key_event_and_error_of_the_record_is_described():
    assert sorted(first_cells("docs/record.md", "key")) == sorted(field.name for field in dataclasses.fields(RunRecord))
    assert set(first_cells("docs/record.md", "event")) == set(get_args(EventKind))
    assert all(f"`{kind}`" in page("docs/record.md") for kind in get_args(errors.ErrorKind))


def test_every_column_is_described():
    tables = page("docs/record.md").split("| column |")[1:]
    described = [re.findall(r"^\| `(\w+)` \|", rows, flags=re.MULTILINE) for rows in tables]
    own = [name for name in metrics.COLUMNS if name not in metrics.METRICS]
    assert described == [list(journal.STEP_COLUMNS), own, list(journal.METRIC_COLUMNS)]
    assert first_cells("docs/telemetry.md", "name") == [*metrics.METRICS]


def test_every_finding_has_a_page():
    words = tomllib.loads(page("src/wellfed/explain/diagnosis/findings.toml"))
    ids = {name for name in words if name[0] != "_"}
    assert ids
    assert ids == {path.stem for path in (ROOT / "docs" / "findings").iterdir()} - {"index"}


def test_links_lead_somewhere():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
    targets = [(path, target) for path in pages for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text())]
    local = [(path, target) for path, target in targets if not target.startswith("https://")]
    assert [(path.name, target) for path, target in local if not (path.parent / target).exists()] == []


@pytest.mark.parametrize("name", CONTRACT)
def test_the_code_of_the_page_runs(name: str):
    """Defines what the page shows; later blocks may use names of earlier ones."""
    space: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", page(f"docs/{name}.md"), flags=re.MULTILINE | re.DOTALL):
        exec(block, space)
