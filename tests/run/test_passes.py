"""The passes of a run: evaluation as it is asked for, and a ceiling that never ends a run."""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from wellfed.config.compose import compose
from wellfed.contract import Datasets, LossOutput
from wellfed.errors import ConfigError
from wellfed.hardware.detect import machine
from wellfed.record import RunRecord
from wellfed.run.bookkeeper import Bookkeeper
from wellfed.run.passes import Passes
from wellfed.run.planner import Planner
from wellfed.run.screen import Terminal
from wellfed.stop_request import Stopped, StopRequest
from wellfed.tracking.journal import Journal

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")


class Line(nn.Module):
    """Notes the sizes of its batches; may fail from a number of steps on."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(1, 1)
        self.sizes: list[int] = []
        self.fails_with: BaseException | None = None

    def loss(self, batch: dict[str, Tensor]) -> LossOutput:
        if self.fails_with is not None:
            raise self.fails_with
        self.sizes.append(len(batch["x"]))
        values = self.out(batch["x"])
        return LossOutput(values.square().mean(), {"mean": values.mean()}, predictions=values, targets=batch["x"])


class Numbers:
    """22 samples: five steps of 4 and one of 2."""

    is_broken = False

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if self.is_broken:
            raise OSError(f"no sample {index}")
        return {"x": torch.tensor([float(index)])}


def datasets() -> Datasets:
    return Datasets(train=Numbers())


def in_pairs(samples: list[Any]) -> Any:
    """Every second sample."""
    return default_collate(samples[::2])


def three_splits() -> Datasets:
    return Datasets(Numbers(), Numbers(), Numbers(), eval_collate={"test": in_pairs}, eval_batch_size={"val": 11})


def passes_of(
    tmp_path: Path, *overrides: str, data: str = "datasets", **more_workload: Any
) -> tuple[Passes, Journal, Any]:
    more = ["logger=none", "loader=baseline", "trainer.accelerator=cpu", "telemetry.ceiling_steps=5", *overrides]
    made = compose([*more, "config.allow_targets=[torch,wellfed,workloads,tests]"])
    workload = replace(
        made.config.workload,
        name="w",
        effective_batch_size=4,
        model={"_target_": f"{__name__}.Line"},
        data={"_target_": f"{__name__}.{data}"},
        optimizer={"_target_": "torch.optim.SGD", "lr": 0.001},
        **more_workload,
    )
    config = replace(made.config, workload=workload)
    planner = Planner.start(replace(made, config=config), machine())
    parts, plan = planner.parts, planner.rough()
    books = Bookkeeper(RunRecord.start("w"), tmp_path, config)
    return Passes(config, parts, plan, books, rank=0), books.journal, parts.model


def fit(passes: Passes) -> None:
    passes.fit(Terminal(quiet=True), StopRequest(), None, lambda: None)


def kinds(journal: Journal) -> list[str]:
    return [event["kind"] for event in journal.record.events]


@pytest.mark.parametrize("steps", [4, 5, 6, 7])
def test_the_ceiling_has_whole_batches_wherever_training_ended(tmp_path: Path, steps: int) -> None:
    passes, journal, model = passes_of(tmp_path, f"trainer.max_steps={steps}", "trainer.max_epochs=null")
    fit(passes)
    assert model.sizes == [4, 4, 4, 4, 4, 2, 4][:steps]
    rate = passes.ceiling(Terminal(quiet=True))
    assert rate is not None
    assert model.sizes[steps:] == [4] * 8
    assert "ceiling_failed" not in kinds(journal)


def test_data_parallel_within_the_model_is_told_when_training_starts(tmp_path: Path) -> None:
    passes, journal, model = passes_of(tmp_path, "trainer.max_steps=1", "trainer.max_epochs=null")
    model.out = nn.Sequential(nn.DataParallel(model.out))
    assert "data_parallel" not in kinds(journal)
    fit(passes)
    (event,) = (event for event in journal.record.events if event["kind"] == "data_parallel")
    assert (event["module"], event["step"]) == ("out.0", 0)


def broken_step(model: Line) -> None:
    model.fails_with = ValueError("no such step\nand more")


def broken_data(model: Line) -> None:
    Numbers.is_broken = True


def no_memory(model: Line) -> None:
    model.fails_with = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [(broken_step, "ValueError: no such step (test_passes.py:"), (broken_data, "no sample"), (no_memory, "memory")],
)
def test_a_ceiling_that_fails_is_an_event_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Any, words: str
) -> None:
    monkeypatch.setattr(Numbers, "is_broken", False)
    passes, journal, model = passes_of(tmp_path, "trainer.max_steps=3", "trainer.max_epochs=null")
    fit(passes)
    weights = [parameter.clone() for parameter in model.parameters()]
    before = kinds(journal)
    spoil(model)
    assert passes.ceiling(Terminal(quiet=True)) is None
    assert kinds(journal) == [*before, "ceiling_failed"]
    assert words in journal.record.events[-1]["message"]
    assert all(torch.equal(now, then) for now, then in zip(model.parameters(), weights, strict=True))


def test_who_stops_a_run_in_its_ceiling_has_stopped_it(tmp_path: Path) -> None:
    passes, journal, model = passes_of(tmp_path, "trainer.max_steps=3", "trainer.max_epochs=null")
    fit(passes)
    model.fails_with = Stopped(15)
    with pytest.raises(Stopped):
        passes.ceiling(Terminal(quiet=True))
    assert "ceiling_failed" not in kinds(journal)


@pytest.mark.parametrize("more", [("telemetry.ceiling_steps=0",), ("telemetry=none",)])
def test_a_ceiling_that_was_not_asked_for_takes_no_step(tmp_path: Path, more: Sequence[str]) -> None:
    passes, _, model = passes_of(tmp_path, *more)
    assert passes.ceiling(Terminal(quiet=True)) is None
    assert model.sizes == []
    assert passes.warm_up() is None
    assert model.sizes == [4] * 4


ONE_STEP = ("trainer.max_steps=1", "trainer.max_epochs=null")


def test_each_split_has_its_batches(tmp_path: Path) -> None:
    passes, _, model = passes_of(tmp_path, *ONE_STEP, "trainer.sanity_batches=0", data="three_splits")
    fit(passes)
    passes.test()
    assert model.sizes == [4, 11, 11, *[2] * 5, 1]


def test_the_knob_goes_before_the_data(tmp_path: Path) -> None:
    overrides = (*ONE_STEP, "trainer.sanity_batches=0")
    passes, _, model = passes_of(tmp_path, *overrides, data="three_splits", eval_batch_size=22)
    fit(passes)
    assert model.sizes == [4, 22]


def test_a_batch_of_each_split_is_tried_before_training(tmp_path: Path) -> None:
    passes, _, model = passes_of(tmp_path, *ONE_STEP, data="three_splits")
    fit(passes)
    assert model.sizes == [11, 2, 4, 11, 11]
    assert set(passes.figures.latest) >= {"val/loss", "val/mean"}


def by_loaders() -> Datasets:
    """Training and validation draw their order from one generator."""
    drawn = torch.Generator().manual_seed(5)
    loaders = [DataLoader(Numbers(), batch_size=4, shuffle=True, generator=drawn) for _ in range(2)]
    return Datasets(*loaders)


@pytest.mark.parametrize("loader", ["baseline", "own"])
def test_a_generator_of_the_users_own_is_left_as_it_was(tmp_path: Path, loader: str) -> None:
    weights = []
    for batches in (0, 1):
        overrides = (*ONE_STEP, f"trainer.sanity_batches={batches}", f"loader={loader}")
        passes, _, model = passes_of(tmp_path, *overrides, data="by_loaders")
        fit(passes)
        weights.append(torch.cat([each.detach().flatten() for each in model.parameters()]))
    assert torch.equal(*weights)


def test_a_broken_validation_ends_a_run_before_its_first_step(tmp_path: Path) -> None:
    passes, _, model = passes_of(tmp_path, *ONE_STEP, data="three_splits")
    model.fails_with, started = KeyError("entry"), []
    with pytest.raises(KeyError) as caught:
        passes.fit(Terminal(quiet=True), StopRequest(), None, lambda: started.append(True))
    assert (started, model.sizes) == ([], [])
    assert "in a batch of val before training; trainer.sanity_batches=0" in caught.value.__notes__[0]


MAX_ACCURACY = ("trainer.best_metric=accuracy", "trainer.best_mode=max")


def test_a_best_metric_that_validation_does_not_give_is_a_fault(tmp_path: Path) -> None:
    passes, _, model = passes_of(tmp_path, *ONE_STEP, *MAX_ACCURACY, data="three_splits")
    with pytest.raises(ConfigError, match=r"trainer.best_metric=accuracy.*one of mean, loss; null"):
        fit(passes)
    assert model.sizes == [11]


MAE = {"_target_": "torchmetrics.MeanAbsoluteError"}
COLLECTED = {"_target_": "torchmetrics.MetricCollection", "metrics": [MAE]}


@pytest.mark.parametrize("metrics", [MAE, [MAE], {"MeanAbsoluteError": MAE}, COLLECTED])
def test_metrics_of_torchmetrics_from_the_configuration(tmp_path: Path, metrics: Any) -> None:
    passes, _, _ = passes_of(tmp_path, *ONE_STEP, data="three_splits", metrics=metrics)
    fit(passes)
    passes.test()
    assert {"val/MeanAbsoluteError", "val/loss", "test/MeanAbsoluteError"} < set(passes.figures.latest)


def test_metrics_that_are_none_are_a_fault(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"workload.metrics.*can't be collected.*Name classes of torchmetrics"):
        passes_of(tmp_path, metrics={"_target_": f"{__name__}.datasets"})


def _compare_waiting(rank: int, folder: Path) -> None:
    """One of two ranks, each on a machine of its own; leaves what its record says of them."""
    books = Bookkeeper(RunRecord.start("r"), folder / str(rank), compose(["logger=none"]).config)
    found = SimpleNamespace(wait_frac=0.1 + 0.3 * rank, readiness_frac=0.9 - 0.5 * rank)
    store = torch.distributed.FileStore(str(folder / "store"), 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    passes: Any = SimpleNamespace(
        _rank=rank,
        _books=books,
        _journal=SimpleNamespace(summary=lambda: found),
        _options=SimpleNamespace(world_size=2),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_RUN_ID", "none")
        patch.setenv("RANK", str(rank))
        patch.setenv("GROUP_RANK", str(rank))
        Passes._compare_waiting(passes)
    (folder / f"{rank}.json").write_text(json.dumps(books.record.loading))


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_ranks_compare_how_long_they_stood_waiting(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_compare_waiting, args=(rank, tmp_path)) for rank in (0, 1)]
    for rank, process in enumerate(ranks):
        (tmp_path / str(rank)).mkdir()
        process.start()
    for process in ranks:
        process.join(40)
        process.kill()
    told = json.loads((tmp_path / "0.json").read_text())
    assert told["longest_wait"] == {"rank": 1, "node": 1, "wait_frac": 0.4, "readiness_frac": 0.4}
