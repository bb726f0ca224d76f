"""The pages under docs/ against the code: keys, events and columns of a run's files, pages of findings, links."""

import dataclasses
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from wellfed import contract, errors
from wellfed.data.settings import LoaderSettings
from wellfed.data.train_loader import train_loader
from wellfed.observe.loggers import journal
from wellfed.observe.telemetry import metrics
from wellfed.record.entries import EventKind, RunRecord
from wellfed.sample_rng import SampleRng

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
    rules = (ROOT / "src/wellfed/explain/diagnosis/rules").glob("*_rules.py")
    code = "".join(path.read_text(encoding="utf-8") for path in rules)
    ids = set(re.findall(r'\b[Ff]inding\(\s*"(\w+)"', code))
    assert ids
    assert ids <= {path.stem for path in (ROOT / "docs" / "findings").iterdir()}


def test_links_lead_somewhere():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
    targets = [(path, target) for path in pages for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text())]
    local = [(path, target) for path, target in targets if not target.startswith("https://")]
    assert [(path.name, target) for path, target in local if not (path.parent / target).exists()] == []


@pytest.fixture(scope="module")
def examples() -> dict[str, Any]:
    """Returns what the code blocks of the pages on the contract define."""
    text = "".join(page(f"docs/{name}.md") for name in CONTRACT)
    space: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        exec(block, space)
    return space


def test_the_stream_of_the_page_is_shared_and_gone_on_with(examples: dict[str, Any], tmp_path: Path):
    paths = [tmp_path / f"{number}.pt" for number in range(3)]
    for number, path in enumerate(paths):
        torch.save(torch.arange(10 * number, 10 * number + 5), path)
    first, second = (train_loader(examples["Files"](paths), LoaderSettings(), batch_size=4, seed=1) for _ in range(2))
    seen = [delivery.batch for _, delivery in zip(range(2), first, strict=False)]
    second.load_state_dict(first.state_dict())
    seen += [delivery.batch for delivery in second]
    first.close()
    second.close()
    assert sorted(torch.cat(seen).tolist()) == [*range(5), *range(10, 15), *range(20, 25)]


def test_the_dataset_of_the_page_draws_by_index_not_by_batch(examples: dict[str, Any]):
    data = examples["Tracks"](torch.ones(5, 3, dtype=torch.uint8), torch.tensor([1, 2, 3, 2, 1]))
    assert isinstance(data, contract.TrainData)
    batch = data.fetch(torch.tensor([2, 3]), SampleRng(1, 0, 0))
    whole = data.on_device(batch, SampleRng(1, 0, 0))["values"]
    part = data.on_device(data.fetch(torch.tensor([3]), SampleRng(1, 0, 7)), SampleRng(1, 0, 7))["values"]
    assert torch.equal(whole[1:], part)
    assert not torch.equal(whole[0], whole[1])


def test_the_evaluation_of_the_page_is_additive(examples: dict[str, Any]):
    inputs, labels = torch.randn(10, 3, generator=torch.Generator().manual_seed(0)), torch.arange(10) % 3
    model, evaluation = torch.nn.Identity(), examples["Accuracy"]()
    results = []
    for cut in (10, 4):
        evaluation.reset()
        for part in zip(inputs.split(cut), labels.split(cut), strict=True):
            evaluation.update(model, part)
        results.append(evaluation.compute())
    assert results[0] == results[1] == {"accuracy": int((inputs.argmax(1) == labels).sum()) / 10}
