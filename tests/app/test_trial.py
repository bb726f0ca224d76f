"""What is made once for many trials, and what a look at their points tells each of them."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wellfed.app import assemble, footprints, trial
from wellfed.app.passes import Passes
from wellfed.app.planner import Planner
from wellfed.config.compose import Composed, compose
from wellfed.config.schema import RunConfig
from wellfed.contract import Datasets, Features, LossOutput
from wellfed.hardware.detect import machine
from wellfed.loading.trial import Trial as FirstBatches
from wellfed.planning.device import plan_device
from wellfed.record import RunRecord
from wellfed.tracking.journal import Journal

NUM_ROWS = 5
asked: list[int] = []
"""Rows that were computed, and pids of those who loaded a sample."""


class Model(nn.Module):
    """Its rows are in train mode other ones than in eval mode."""

    def __init__(self, rows: str = "frozen") -> None:
        super().__init__()
        self.encode, self.kind = nn.Sequential(nn.Linear(1, 3), nn.Dropout(0.5)), rows
        self.out = nn.Linear(3, 1)

    def rows(self, indices: Tensor) -> Tensor:
        asked.append(len(indices))
        if self.kind == "broken":
            raise RuntimeError("no rows")
        return self.encode(indices[:, None].float())

    def features(self) -> Features:
        return Features(NUM_ROWS, NUM_ROWS * 12, self.rows, trainable=self.kind == "trained")

    def loss(self, batch: dict[str, Tensor]) -> LossOutput:
        return LossOutput(self.out(torch.ones(len(batch["index"]), 3)).square().mean())


class Items:
    """Notes who loads them."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        asked.append(os.getpid())
        return {"index": torch.tensor(index)}


class Unreadable(Items):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        raise OSError(f"no sample {index}")


def datasets(kind: str = "Items") -> Datasets:
    return Datasets(train={"Items": Items, "Unreadable": Unreadable}[kind]())


@pytest.fixture(autouse=True)
def nothing_asked() -> None:
    asked.clear()
    torch.manual_seed(0)


def composed(*overrides: str, rows: str = "frozen", data: str = "Items") -> Composed[RunConfig]:
    made = compose(["logger=none", "loader=baseline", "trainer.accelerator=cpu", *overrides])
    workload = replace(
        made.config.workload,
        name="w",
        effective_batch_size=4,
        model={"_target_": f"{__name__}.Model", "rows": rows},
        data={"_target_": f"{__name__}.datasets", "kind": data},
        optimizer={"_target_": "torch.optim.SGD", "lr": 0.1},
    )
    return replace(made, config=replace(made.config, workload=workload))


# -- rows ------------------------------------------------------------------------------------------------------------


def prepared(*overrides: str, **more: str) -> assemble.Parts:
    before = torch.get_num_threads()
    try:
        return trial.prepare(composed(*overrides, **more)).parts
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("mode", ["cache", "cache_host"])
def test_rows_that_trials_keep_are_computed_once_as_a_trial_does(mode: str) -> None:
    parts = prepared(f"memory.features={mode}")
    assert parts.features is not None
    assert parts.model.training
    assert asked == [NUM_ROWS]
    parts.model.eval()
    assert parts.feature_rows is not None
    assert parts.feature_rows.equal(parts.features.rows(torch.arange(NUM_ROWS)))
    assert not parts.feature_rows.requires_grad


@pytest.mark.parametrize(
    ("mode", "rows"), [("dynamic", "frozen"), ("dynamic", "trained"), ("null", "trained")], ids=str
)
def test_rows_that_no_trial_keeps_are_not_computed(mode: str, rows: str) -> None:
    assert prepared(f"memory.features={mode}", rows=rows).feature_rows is None
    assert asked == []


def test_rows_that_take_long_are_left_to_the_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_ROWS_S", -1.0)
    assert prepared("memory.features=cache").feature_rows is None


def test_rows_that_can_not_be_computed_are_for_a_trial_to_tell() -> None:
    parts = prepared("memory.features=cache", rows="broken")
    assert parts.feature_rows is None
    assert parts.model.training


def planner(point: Composed[RunConfig], parts: assemble.Parts) -> Planner:
    facts = machine()
    device = plan_device(point.config, point.choices, facts)
    assert not isinstance(device, list)
    return Planner(point.config, point.choices, facts, device, parts)


# -- the look --------------------------------------------------------------------------------------------------------


def looked_at(tmp_path: Path, points: Sequence[Composed[RunConfig]], parts: assemble.Parts) -> list[dict[str, Any]]:
    task = trial.Look([(str(number), each) for number, each in enumerate(points)], tmp_path / "plans.jsonl")
    trial.look(parts, task)
    _, *plans = map(json.loads, task.file.read_text().splitlines())
    return plans


def parts_of(data: str = "Items") -> assemble.Parts:
    return assemble.make_parts(composed(data=data).config)


def test_a_look_tells_what_the_first_batches_are_and_builds_them_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_2 = ["loader.backend=torch", "loader.num_workers=2"]
    points = [
        composed(*torch_2),
        composed(*torch_2, "workload.schedule.warmup_steps=7"),
        composed("loader.num_workers=0"),
        composed(*torch_2, "loader.prefetch_factor=7"),
        composed(*torch_2, "trainer.devices=2"),
    ]
    built: list[Any] = []
    really = assemble.look_at_first_batches
    monkeypatch.setattr(assemble, "look_at_first_batches", lambda *given: built.append(given) or really(*given))
    plans = looked_at(tmp_path, points, parts_of())
    assert [plan["problem"] for plan in plans] == [None] * 5
    first = FirstBatches(**plans[0]["seen"]["first_batches"])
    assert (first.num_batches, first.batch_bytes) == (6, 4 * 8)
    assert plans[1]["seen"]["first_batches"] == plans[3]["seen"]["first_batches"] == plans[0]["seen"]["first_batches"]
    assert plans[2]["seen"]["first_batches"] is None  # nobody builds ahead
    assert plans[4]["seen"]["first_batches"]["batch_bytes"] == 2 * 8
    assert len(built) == 2


def test_batches_that_can_not_be_held_are_told_by_the_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    huge = FirstBatches(1.0, 2**50, 100)
    monkeypatch.setattr(assemble, "look_at_first_batches", lambda *given: huge)
    point = composed("loader.backend=torch", "loader.num_workers=2")
    (plan,) = looked_at(tmp_path, [point], parts_of())
    assert "the batches kept ready don't fit" in plan["problem"]


def test_data_that_fails_is_left_to_the_trial(tmp_path: Path) -> None:
    (plan,) = looked_at(
        tmp_path,
        [composed("loader.backend=processes", "loader.num_workers=1", data="Unreadable")],
        parts_of("Unreadable"),
    )
    assert (plan["problem"], plan["seen"]["first_batches"]) == (None, None)


def test_memory_that_the_look_has_estimated_is_not_estimated_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point, parts = composed("gpu=24gb", f"paths.cache_dir={tmp_path / 'cache'}"), parts_of()
    (plan,) = looked_at(tmp_path, [point], parts)
    assert plan["predicted_peak_gib"] > 0
    trained: list[assemble.Parts] = []
    monkeypatch.setattr(trial, "train", lambda composed, parts: trained.append(parts) or 0)
    before = multiprocessing.get_start_method(allow_none=True)
    try:
        trial.work(trial.Shared(parts, torch.get_num_threads()), trial.Task(point, plan["seen"]))
    finally:
        multiprocessing.set_start_method(before, force=True)
    monkeypatch.setattr(footprints, "cached_measure", None)
    again = planner(point, trained[0]).for_training(0)
    assert again.predicted_peak_gib == plan["predicted_peak_gib"]
    assert planner(point, parts).for_training(0).predicted_peak_gib is None


# -- the warm-up -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build_ms", "more", "is_here"),
    [(1.0, (), True), (900.0, (), False), (None, (), False), (1.0, ("loader.max_skipped=1",), False)],
)
def test_the_few_batches_of_the_warm_up_start_workers_only_where_that_pays(
    tmp_path: Path, build_ms: float | None, more: Sequence[str], is_here: bool
) -> None:
    point = composed("loader.backend=torch", "loader.num_workers=2", "telemetry.ceiling_steps=2", *more)
    known = None if build_ms is None else FirstBatches(build_ms, 80, 6)
    parts = replace(parts_of(), first_batches=known)
    journal = Journal(RunRecord.start("w"), tmp_path)
    passes = Passes(
        point.config,
        parts,
        planner(point, parts).rough(),
        journal,
        checkpoints=tmp_path,
        rank=0,
        on_event=journal.event,
    )
    asked.clear()
    rate = passes.warm_up()
    assert rate is not None
    assert rate > 0
    assert (os.getpid() in asked) is is_here
