"""Evaluations of a run: which process and thread builds their batches."""

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wellfed.config.compose import compose
from wellfed.contract import Datasets, LossOutput
from wellfed.observe.hardware.detect import machine
from wellfed.observe.hardware.torch_cuda import torch_cuda
from wellfed.record import RunRecord
from wellfed.run.bookkeeper import Bookkeeper
from wellfed.run.objects.run_objects import RunObjects
from wellfed.run.passes.passes import Passes
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


def evaluated(folder: Path, *overrides: str) -> tuple[RunObjects, dict[str, float]]:
    """Returns the objects of an evaluation, and its metrics."""
    allowed = "config.allow_targets=[torch,wellfed,workloads,tests]"
    made = compose(["logger=none", "memory.micro_batch=8", allowed, *overrides])
    workload = replace(
        made.config.workload,
        name="w",
        effective_batch_size=16,
        model={"_target_": f"{__name__}.Line"},
        data={"_target_": f"{__name__}.datasets"},
        optimizer={"_target_": "torch.optim.SGD", "lr": 0.1},
    )
    config = replace(made.config, workload=workload)
    planner = Planner.start(replace(made, config=config), machine(torch_cuda()))
    parts, plan = planner.parts, planner.rough()
    books = Bookkeeper(RunRecord.start("w"), folder, config)
    return parts, Passes(config, parts, plan, books, rank=0).evaluate(None)


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
