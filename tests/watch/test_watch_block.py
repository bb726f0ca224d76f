"""A watch in code, on the real packages: a Trainer of transformers, Accelerate, Ray Train."""

from __future__ import annotations

import csv
import gc
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.watch.watching import findings_of
from wellfed import Watch
from wellfed.record.entries import RunRecord
from wellfed.watch.watched_script import WatchedScript


class Slow(Dataset[Any]):
    """Takes 3 ms a sample."""

    def __init__(self, number: int = 160) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(0.003)
        return {"x": torch.full((8,), float(index)), "labels": torch.tensor(index % 2)}


class Classifier(nn.Module):
    """Returns its loss, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.linear(x)
        assert labels is not None
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def run_of(log_dir: Path) -> tuple[RunRecord, list[dict[str, str]]]:
    (folder,) = (log_dir / "watch" / "runs").iterdir()
    with (folder / "steps.csv").open() as stream:
        return RunRecord.read(folder), list(csv.DictReader(stream))


@pytest.fixture
def torch_as_before() -> Iterator[None]:
    """Nothing stays replaced, and later messages reach the root's log again."""
    log = logging.getLogger("wellfed")
    log_before = (log.propagate, log.handlers[:])
    names = {DataLoader: "__iter__", torch.autograd: "backward", torch: "save", nn.Module: "__call__"}
    names[torch.autocast] = "__enter__"
    before = [getattr(owner, name) for owner, name in names.items()]
    yield
    assert [getattr(owner, name) for owner, name in names.items()] == before
    assert "__call__" not in vars(Classifier)
    assert (log.propagate, log.handlers) == log_before
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is WatchedScript]


@pytest.mark.slow
@pytest.mark.usefixtures("torch_as_before")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_a_trainer_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    arguments = transformers.TrainingArguments(
        str(tmp_path / "out"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(Classifier(), arguments, train_dataset=Slow(), eval_dataset=Slow(16))
    with Watch("of a trainer", tmp_path / "logs"):
        trainer.train()
    record, rows = run_of(tmp_path / "logs")
    assert (record.workload, record.status, record.steps) == ("of a trainer", "ok", 40)
    assert record.phases["validate"]["times"] == 2
    assert record.phases["checkpoint"]["times"] >= 2
    assert sum(int(row["samples"]) for row in rows[1:]) == pytest.approx(2 * 160, abs=16)
    # All batches of a step are read before its passes, and another one at the begin of an epoch.
    steps = [(row["samples"], row["micro_batch"], row["num_micro"]) for row in rows[1:]]
    assert steps.count(("8", "4", "2")) >= 35
    assert "loading_in_main_process" in findings_of(record)
    assert "Report" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("torch_as_before")
def test_a_loop_of_accelerate(tmp_path: Path) -> None:
    """Its loaders are a batch ahead of the loop."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = Classifier()
    loader = DataLoader(Slow(), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    with Watch("loop", tmp_path), Watch("inner", tmp_path / "inner"):
        for _ in range(2):
            for batch in loader:
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
    record, rows = run_of(tmp_path)
    assert record.steps == 80
    assert sum(int(row["samples"]) for row in rows) == pytest.approx(2 * 160, abs=4)
    assert "loading_in_main_process" in findings_of(record)
    assert not (tmp_path / "inner").exists()


@pytest.mark.usefixtures("torch_as_before")
def test_an_error_within_the_block(tmp_path: Path) -> None:
    def train() -> None:
        model = Classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Watch("loop", tmp_path):
            for number, batch in enumerate(DataLoader(Slow(), batch_size=4)):
                model(**batch)["loss"].backward()
                optimizer.step()
                if number == 30:
                    raise ValueError("bad batch")

    with pytest.raises(ValueError, match="bad batch"):
        train()
    record, _ = run_of(tmp_path)
    assert record.status == "failed"
    assert record.error is not None
    assert record.error["message"] == "ValueError: bad batch"
