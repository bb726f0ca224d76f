"""Stages of a run: each is planned, all are trained in one run, and impossible ones are refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kit import encoded
from tests.kit.few import slow
from tests.kit.machines import LAPTOP, SMALL, TWO
from wellfed import contract
from wellfed.config.compose import compose
from wellfed.contract import Datasets, Features, LossOutput
from wellfed.errors import ConfigError
from wellfed.observe.hardware.detect import machine
from wellfed.process import StopRequest
from wellfed.record import RunRecord
from wellfed.run.bookkeeper import Bookkeeper
from wellfed.run.passes.passes import Passes
from wellfed.run.planner import Planner
from wellfed.run.screen import Terminal

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")
STAGES = "memory.stages=[{from_epoch:0,features:cache},{from_epoch:2,features:dynamic}]"
STEPS = 4  # of an epoch


def planner_of(
    *overrides: str, facts: Any = LAPTOP, model: dict[str, Any] | None = None, data: str = "tests.kit.encoded.datasets"
) -> Planner:
    usual = ["logger=none", "loader=baseline", "config.allow_targets=[torch,wellfed,workloads,tests]"]
    usual.append("workload.schedule.name=constant")  # a run that is left early has the same rates
    made = compose([*usual, *overrides])
    workload = replace(
        made.config.workload,
        name="w",
        effective_batch_size=16,
        model=model or {"_target_": "tests.kit.encoded.Encoded"},
        data={"_target_": data},
        optimizer={"_target_": "torch.optim.AdamW", "lr": 0.01},
    )
    return Planner.start(replace(made, config=replace(made.config, workload=workload)), facts)


def passes_of(folder: Path, *overrides: str, **more: Any) -> tuple[Passes, RunRecord, nn.Module]:
    cpu = ["trainer.accelerator=cpu", "telemetry.ceiling_steps=3", "trainer.max_epochs=4"]
    planner = planner_of(*cpu, *overrides, facts=machine(), **more)
    folder.mkdir(exist_ok=True)
    record = RunRecord.start("w")
    books, plan = Bookkeeper(record, folder, planner.config), planner.for_training(0)
    books.planned(plan)
    return Passes(planner.config, planner.parts, plan, books, rank=0), record, planner.parts.model


def fit(passes: Passes, checkpoint: Path | None = None) -> None:
    passes.fit(Terminal(quiet=True), StopRequest(), checkpoint, lambda: None)


def kinds(record: RunRecord) -> list[str]:
    return [event["kind"] for event in record.events]


# -- the plan ---------------------------------------------------------------------------------------------------------


def test_each_stage_is_planned_with_the_encoder_as_it_is_then(tmp_path: Path) -> None:
    wide = {"_target_": "tests.kit.encoded.Encoded", "width": 512}
    planner = planner_of(STAGES, "gpu=8gb", f"paths.cache_dir={tmp_path}", facts=SMALL, model=wide)
    model = planner.parts.model
    head = sum(weight.nbytes for weight in model.head.parameters())
    assert planner.model.trainable_bytes == head
    estimate = planner.estimate(planner.rough())
    plan = planner.with_stages(planner.estimated(estimate))
    assert [(stage.from_epoch, stage.memory.features) for stage in plan.stages] == [(0, "cache"), (2, "dynamic")]
    assert estimate("cache", False).gradients == blocks_of(model.head)
    assert plan.parts["optimizer state"] == pytest.approx(
        2 * blocks_of(model), rel=0.01
    )  # the peak is that of the stage that needs most
    assert plan.memory.features == "cache"
    assert planner.model.trainable_bytes == head  # and it begins with the first
    assert plan.remembered_in is None  # a size that a later stage had to lower says nothing of the first
    reason = plan.knobs["memory.stages"]
    assert [stage["micro_batch"] for stage in reason.value] == [16, 16]
    assert "from epoch 2 features=dynamic, micro_batch=16 (16 samples a step" in reason.because


def blocks_of(module: nn.Module) -> int:
    """Returns the bytes of the weights as a card allocates them."""
    return sum(-(-weight.nbytes // 512) * 512 for weight in module.parameters())


def test_a_stage_that_does_not_fit_is_named(tmp_path: Path) -> None:
    model = {"_target_": "tests.kit.encoded.Encoded", "width": 2048}
    overrides = (STAGES, "gpu=8gb", "gpu.memory_gib=0.07", f"paths.cache_dir={tmp_path}")
    first = planner_of(*overrides, facts=SMALL, model=model)
    assert first.estimated(first.estimate(first.rough())).misfit is None
    plan = first.with_stages(first.estimated(first.estimate(first.rough())))
    assert "in the stage of memory.stages from epoch 2 on the budget is" in str(plan.misfit)
    assert "memory.features" not in str(plan.misfit)  # which stages would contradict
    with pytest.raises(ConfigError, match="from epoch 2 on"):  # as for training, on the card
        first._with_stages(plan, lambda later: later._fitted(later.estimate(later.rough()), None))


@pytest.mark.slow
def test_micro_batches_are_planned_for_each_stage(tmp_path: Path) -> None:
    """A budget that fits a whole step with a frozen encoder, and parts of one with a trained encoder."""
    planner = planner_of(
        STAGES,
        "gpu=8gb",
        "gpu.memory_gib=0.06",
        "gpu.precision=32-true",
        f"paths.cache_dir={tmp_path}",
        facts=SMALL,
        model={"_target_": f"{__name__}.Wide"},
    )
    plan = planner.with_stages(planner.estimated(planner.estimate(planner.rough())))
    first, second = (stage.memory.micro_batch for stage in plan.stages)
    assert first == 16 > second >= 1
    assert plan.least_micro_batch == second


class Wide(encoded.Encoded):
    """A model whose trained encoder keeps 4 MiB of activations per row."""

    def features(self) -> Features:
        inner = super().features()

        def rows(indices: Tensor) -> Tensor:
            rows = inner.rows(indices)
            wide = rows.repeat(1, 2**10)
            for _ in range(64):
                wide = wide.sin()
            return rows + wide.view(len(indices), -1, self.width).mean(1)

        return replace(inner, rows=rows)


class Alone(encoded.Encoded):
    """A model whose scores are its rows."""

    def __init__(self) -> None:
        super().__init__(1)
        del self.head

    def loss(self, batch: dict[str, Tensor]) -> LossOutput:
        return LossOutput((batch["x"].squeeze(1) - batch["y"]).square().mean())


class NoFeatures(encoded.Encoded):
    features = None  # type: ignore[assignment]


def refused(*overrides: str, **more: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        planner_of(*overrides, **more).rough()
    return str(raised.value)


def test_stages_that_make_no_sense_here_are_refused() -> None:
    told = refused(STAGES, model={"_target_": f"{__name__}.NoFeatures"})
    assert "memory.stages: this workload offers no features that could be held otherwise." in told
    told = refused(STAGES, model={"_target_": f"{__name__}.Alone"})
    assert "features=cache from epoch 0 leaves nothing to train: all weights are the encoder's." in told
    told = refused(STAGES.replace("dynamic", "cache_host"))
    assert "the workload trains the encoder of its features, and no stage computes them anew." in told
    told = refused(STAGES, "trainer=fsdp", "trainer.devices=2", facts=TWO)
    assert "memory.stages: trainer.strategy=fsdp shards the model once" in told


def test_a_guest_holds_its_features_itself() -> None:
    guest = {"_target_": "tests.end_to_end.guest_module.Guest"}
    told = refused(STAGES, model=guest, data="tests.end_to_end.guest_module.data")
    assert "memory.stages: a LightningModule holds its features itself. Set memory.stages=null." in told


def test_a_stage_behind_the_end_is_warned_of() -> None:
    warnings = planner_of(STAGES, "trainer.max_epochs=2").rough().warnings
    (told,) = [warning for warning in warnings if "memory.stages" in warning]
    assert told == (
        "memory.stages: the stage from epoch 2 on (dynamic) does not begin: the run ends after trainer.max_epochs=2, "
        "its epochs count from 0."
    )
    assert not any(
        "memory.stages" in warning for warning in planner_of(STAGES, "trainer.max_epochs=3").rough().warnings
    )


# -- training ---------------------------------------------------------------------------------------------------------


def test_one_run_goes_through_all_stages(tmp_path: Path) -> None:
    passes, record, model = passes_of(tmp_path, STAGES)
    before = encoded.encoder_weights(model)
    fit(passes)
    assert not torch.equal(encoded.encoder_weights(model), before)
    (event,) = (event for event in record.events if event["kind"] == "stage")
    assert (event["step"], event["epoch"], event["joined"]) == (2 * STEPS, 2, before.numel())
    assert passes.ceiling.measure(Terminal(quiet=True)) is not None
    assert "ceiling_failed" not in kinds(record)
    passes.test()
    assert passes.figures.latest["test/loss"] > 0
    assert (record.plan["memory.stages"]["value"][1]["features"], record.plan["memory.stages"]["source"]) == (
        "dynamic",
        "set",
    )


@pytest.mark.parametrize("features", ["cache", "dynamic"])
def test_a_frozen_encoder_that_stays_in_eval_mode_does_so_from_the_start(features: str) -> None:
    model = {"_target_": "tests.kit.encoded.Encoded", "train_encoder": False}
    found = planner_of(f"memory.features={features}", model=model).parts.model
    assert found.training
    assert not found.encoder.training


@pytest.mark.slow
def test_features_that_nobody_trains_are_held_otherwise_too(tmp_path: Path) -> None:
    model = {"_target_": "tests.kit.encoded.Encoded", "train_encoder": False}
    staged, record, one = passes_of(tmp_path / "staged", STAGES, model=model)
    throughout, _, other = passes_of(tmp_path / "throughout", "memory.features=dynamic", model=model)
    for passes in (staged, throughout):
        fit(passes)
    (event,) = (event for event in record.events if event["kind"] == "stage")
    assert (event["features"], event["joined"]) == ("dynamic", 0)
    for weight, expected in zip(one.parameters(), other.parameters(), strict=True):
        assert (weight - expected).abs().max() < 1e-5


@pytest.mark.parametrize(
    "left_at",
    [2 * STEPS, *map(slow, (STEPS + 1, 3 * STEPS + 1))],
)
def test_what_is_left_before_at_or_after_the_change_goes_on_to_the_same_weights(tmp_path: Path, left_at: int) -> None:
    whole, _, expected = passes_of(tmp_path / "whole", STAGES)
    fit(whole)
    left, _, _ = passes_of(tmp_path / "left", STAGES, f"trainer.max_steps={left_at}")
    fit(left)
    resumed, record, model = passes_of(tmp_path / "resumed", STAGES)
    fit(resumed, tmp_path / "left" / "checkpoints" / "last.ckpt")
    assert resumed.figures.step == 4 * STEPS
    for weight, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(weight, other)
    assert ("stage" in kinds(record)) == (left_at <= 2 * STEPS)


class Series:
    """Data whose batches carry rows of a store on the CPU, unless the store is on the device."""

    carried: list[tuple[str, bool]] = []  # noqa: RUF012  what the model was given, in order

    def __init__(self, mode: str = "dynamic") -> None:
        self.mode = mode

    def for_features(self, mode: contract.FeatureModeName) -> Series:
        return Series(mode)

    def __len__(self) -> int:
        return encoded.NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        return {name: value[0] for name, value in self.fetch(torch.tensor([index]), None).items()}

    def fetch(self, indices: Tensor, rng: Any) -> dict[str, Tensor]:
        batch = {"row": indices, "y": indices.float() / 64}
        return batch if self.mode == "cache" else {**batch, "window": cut(store(), indices)}

    def on_device(self, batch: dict[str, Tensor], rng: Any, features: Any) -> dict[str, Tensor]:
        Series.carried.append((type(features).__name__, "window" in batch))
        window = batch["window"] if "window" in batch else features.rows(batch["row"])
        return {"x": window, "y": batch["y"]}


def store() -> Tensor:
    return torch.sin(torch.arange(80.0))


def cut(values: Tensor, rows: Tensor) -> Tensor:
    return values.as_strided((65, 16), (1, 1)).index_select(0, rows)


def series() -> Datasets:
    return Datasets(
        Series(), Series(), Series(), features=Features(64, 320, lambda rows: cut(store(), rows), store=store, cut=cut)
    )


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 1)

    def loss(self, batch: dict[str, Tensor]) -> LossOutput:
        return LossOutput((self.head(batch["x"]).squeeze(1) - batch["y"]).square().mean())


@pytest.fixture
def carried() -> Iterator[list[tuple[str, bool]]]:
    Series.carried.clear()
    yield Series.carried
    Series.carried.clear()


@pytest.mark.parametrize("backend", ["inline", *map(slow, ("threads", "processes"))])
def test_loaders_build_what_batches_carry_then(tmp_path: Path, carried: list[tuple[str, bool]], backend: str) -> None:
    workers = [] if backend == "inline" else ["loader.num_workers=1", "loader.persistent_workers=true"]
    overrides = [STAGES, f"loader.backend={backend}", "loader.num_workers=null", *workers]
    more = {"model": {"_target_": f"{__name__}.Head"}, "data": f"{__name__}.series"}
    passes, record, model = passes_of(tmp_path / "staged", *overrides, **more)
    carried.clear()
    fit(passes)
    assert kinds(record).count("stage") == 1
    forms = list(dict.fromkeys(carried))
    assert forms == [("DeviceTable", False), ("Computed", True)]  # none of the old form after the change
    throughout, _, other = passes_of(tmp_path / "throughout", "memory.features=dynamic", **more)
    fit(throughout)
    assert torch.equal(model.head.weight, other.head.weight)


@pytest.mark.slow
def test_a_resumed_run_loads_what_its_stage_needs_from_its_first_batch(
    tmp_path: Path, carried: list[tuple[str, bool]]
) -> None:
    more = {"model": {"_target_": f"{__name__}.Head"}, "data": f"{__name__}.series"}
    left, _, _ = passes_of(tmp_path / "left", STAGES, f"trainer.max_steps={2 * STEPS + 1}", **more)
    fit(left)
    resumed, _, _ = passes_of(tmp_path / "resumed", STAGES, **more)
    carried.clear()
    fit(resumed, tmp_path / "left" / "checkpoints" / "last.ckpt")
    assert set(carried) == {("Computed", True)}
