"""Evaluations of a run: which process and thread builds their batches."""

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from tests.kit.composed import compose
from wellfed.contract import Datasets, LossOutput
from wellfed.errors import ConfigError
from wellfed.observe.hardware.detect import machine
from wellfed.observe.hardware.torch_cuda import torch_cuda
from wellfed.record.entries import RunRecord
from wellfed.run.bookkeeper import Bookkeeper
from wellfed.run.objects.run_objects import RunObjects
from wellfed.run.passes.choice import passes_class
from wellfed.run.planner import Planner


class Rows:
    """Data that record thread and process of each build."""

    def __init__(self) -> None:
        self.builders: set[str] = set()

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError

    def fetch(self, indices: Tensor, rng: Any) -> dict[str, Tensor]:
        self.builders.add(threading.current_thread().name)
        return {"x": indices[:, None].float(), "process": torch.full_like(indices, os.getpid())}


class Line(nn.Module):
    """A model that records where its batches were built."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(1, 1)
        self.processes: set[int] = set()

    def loss(self, batch: dict[str, Tensor]) -> LossOutput:
        self.processes |= set(batch["process"].tolist())
        return LossOutput(self.line(batch["x"]).square().mean())


def datasets() -> Datasets:
    return Datasets(train=Rows(), test=Rows())


class Own(pl.LightningModule):
    """The same model as a LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Line()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model.loss(batch).loss

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("loss", self.model.loss(batch).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def evaluated(
    folder: Path, *overrides: str, model: str = "Line", checkpoint: Path | None = None
) -> tuple[RunObjects, dict[str, float]]:
    """Returns the objects of an evaluation, and its metrics."""
    made = compose(["logger=none", "memory.micro_batch=8", *overrides])
    workload = replace(
        made.config.workload,
        name="w",
        effective_batch_size=16,
        model={"_target_": f"{__name__}.{model}"},
        data={"_target_": f"{__name__}.datasets"},
        optimizer={"_target_": "torch.optim.SGD", "lr": 0.1},
    )
    config = replace(made.config, workload=workload)
    planner = Planner.start(replace(made, config=config), machine(torch_cuda()))
    parts, plan = planner.parts, planner.rough()
    books = Bookkeeper(RunRecord.start("w"), folder, config)
    return parts, passes_class(parts)(config, parts, plan, books, rank=0).evaluate(checkpoint)


@pytest.mark.slow  # on a simulated card; tests/data/test_prefetch_on_cards.py
@pytest.mark.simulated(strict=True, slowdown=3)
def test_an_evaluation_is_built_by_workers_and_copied_ahead(tmp_path: Path) -> None:
    parts, expected = evaluated(tmp_path, "loader=baseline")
    assert (parts.data.test.builders, parts.model.processes) == ({"MainThread"}, {os.getpid()})
    parts, metrics = evaluated(tmp_path, "loader.backend=inline", "loader.device_prefetch=2")
    assert parts.data.test.builders == {"wellfed-device-prefetch"}
    assert metrics == expected
    parts, metrics = evaluated(tmp_path, "loader.backend=threads", "loader.num_workers=2")
    assert parts.data.test.builders == {"wellfed-loader"}
    assert metrics == expected
    parts, metrics = evaluated(tmp_path, "loader.backend=processes", "loader.num_workers=2")
    assert len(parts.model.processes) == 2
    assert os.getpid() not in parts.model.processes
    assert metrics == expected


@pytest.mark.filterwarnings("ignore::Warning:lightning")
def test_a_module_is_evaluated_with_weights_alone_and_what_lacks_more_is_one_message(tmp_path: Path) -> None:
    own, path = ("loader=baseline", "trainer.accelerator=cpu"), tmp_path / "x.ckpt"
    state = {"state_dict": Own().state_dict(), "global_step": 3, "pytorch-lightning_version": "2.6.0"}
    torch.save(state, path)
    assert "loss" in evaluated(tmp_path, *own, model="Own", checkpoint=path)[1]
    del state["pytorch-lightning_version"]
    torch.save(state, path)
    with pytest.raises(ConfigError, match="x.ckpt: its state can't be restored .KeyError: 'pytorch-lightning_version'"):
        evaluated(tmp_path, *own, model="Own", checkpoint=path)
