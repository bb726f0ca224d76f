from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from tests.kit import tiny
from tests.kit.few import slow
from wellfed.contract import LossOutput
from wellfed.errors import ConfigError, WellfedError
from wellfed.train.lightning import trainer as lit
from wellfed.train.lightning.callbacks.figures import Figures
from wellfed.train.lightning.checkpoints.checkpoints import CheckpointOptions
from wellfed.train.lightning.checkpoints.late_checkpoints import BeforeUsers, LateCheckpoints
from wellfed.train.plain_model.scheduling import Schedule, Scheduling

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")


@given(
    name=st.sampled_from(["constant", "cosine", "linear"]),
    warmup=st.integers(0, 50),
    floor=st.floats(0, 1),
    total=st.one_of(st.none(), st.integers(1, 500)),
    step=st.integers(0, 600),
)
def test_the_schedule_stays_between_its_bounds(name, warmup, floor, total, step) -> None:
    schedule = Schedule(name, warmup, floor, total)
    factor = schedule(step)
    assert 0 < factor <= 1 if step < warmup else floor - 1e-9 <= factor <= 1
    if step + 1 < warmup:
        assert schedule(step + 1) > factor
    if step >= warmup:
        assert schedule(step + 1) <= factor + 1e-12


def test_cosine_ends_at_its_floor_and_warm_up_rises_to_one() -> None:
    schedule = Schedule("cosine", 4, 0.1, 104)
    assert [schedule(step) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert schedule(54) == pytest.approx(0.55)
    assert schedule(104) == schedule(1000) == pytest.approx(0.1)


class Rates(pl.Callback):
    """Callback that records the rate of each step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.seen.append(trainer.optimizers[0].param_groups[0]["lr"])


def trained(folder: Path, scheduling: Scheduling, checkpoint: Path | None = None, **changes: Any) -> Any:
    """Trains three steps an epoch; returns rates, weights and written metrics."""
    rates, told = Rates(), []
    figures = Figures(lambda split, values, **_: told.append((split, dict(values))), every=2, stop_on_nan=True)
    asked = CheckpointOptions(changes.pop("save_every", None), None, 9, "loss", "min")
    kept = LateCheckpoints(folder, asked, {}, lambda error, step: None)
    module = tiny.module(scheduling=scheduling)
    callbacks = [rates, figures, BeforeUsers(kept), kept]
    trainer = lit.make_trainer(tiny.options(max_steps=None, **changes), callbacks, folder)
    lit.fit(trainer, module, tiny.loader(), tiny.eval_loader(), checkpoint)
    return rates.seen, tiny.weights(module), told


def test_a_scheduler_of_torch_steps_by_epochs_or_steps(tmp_path: Path) -> None:
    def halving(optimizer: Any) -> Any:
        return lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    rates, _, _ = trained(tmp_path, Scheduling(halving, "epoch", None), max_epochs=2)
    assert rates == [0.01] * 3 + [0.005] * 3
    rates, _, _ = trained(tmp_path, Scheduling(halving, "step", None), max_epochs=1)
    assert rates == [0.01, 0.005, 0.0025]


def plateau(optimizer: Any) -> Any:
    return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0, threshold_mode="abs")


@pytest.mark.parametrize(
    ("interval", "every", "expected"),
    [
        (None, None, [0.01] * 6 + [0.005] * 3),
        # after the validations of steps 2, 4, 6 and 8
        ("step", 2, [0.01] * 4 + [0.005] * 2 + [0.0025] * 2 + [0.00125]),
    ],
)
def test_a_plateau_goes_by_its_figure(tmp_path: Path, interval: Any, every: int | None, expected: list[float]) -> None:
    scheduling = Scheduling(plateau, interval, "val/loss")
    rates, _, _ = trained(tmp_path, scheduling, max_epochs=3, validate_every_steps=every)
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize(
    ("every", "cut"),
    [
        *((None, cut) for cut in (2, 3)),  # within an epoch, at its end
        *((2, cut) for cut in (3, 4)),  # between two validations, at one
        *(slow(every, cut) for every, cut in ((None, 4), (None, 6), (2, 2), (2, 6))),
    ],
)
def test_a_resumed_schedule_goes_on_where_it_was(tmp_path: Path, every: int | None, cut: int) -> None:
    scheduling = Scheduling(plateau, "step" if every else "epoch", "val/loss")
    limits = {"max_epochs": 3, "validate_every_steps": every, "save_every": 1}
    rates, weights, _ = trained(tmp_path / "whole", scheduling, **limits)
    checkpoint = tmp_path / "whole" / f"last-{9 - cut}.ckpt"
    assert torch.load(checkpoint, weights_only=True)["global_step"] == cut
    again, resumed, _ = trained(tmp_path / "cut", scheduling, checkpoint, **limits)
    assert again == rates[cut:]
    assert torch.equal(weights, resumed)


class NanInTwoSteps(tiny.TinyModel):
    """A model whose losses of steps 4 and 5 are NaN."""

    def loss(self, batch: Any) -> LossOutput:
        output = super().loss(batch)
        return LossOutput(output.loss * float("nan")) if self.calls in (4, 5) else output


def chained(optimizer: Any) -> Any:
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.1, 4), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    )


def sequential(optimizer: Any) -> Any:
    warmup, decay = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=6), lr_scheduler.CosineAnnealingLR(optimizer, 8)
    return lr_scheduler.SequentialLR(optimizer, [warmup, decay], [6])


ANY_SCHEDULER: dict[str, Any] = {
    "factor": None,
    "OneCycleLR": lambda it: lr_scheduler.OneCycleLR(it, 0.1, total_steps=20, cycle_momentum=False),
    "CyclicLR": lambda it: lr_scheduler.CyclicLR(it, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
    "SequentialLR": sequential,
    "ChainedScheduler": chained,
    "CosineAnnealingLR": lambda it: lr_scheduler.CosineAnnealingLR(it, 5, eta_min=0.001),
    "StepLR": lambda it: lr_scheduler.StepLR(it, 2),
    "LambdaLR": lambda it: lr_scheduler.LambdaLR(it, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda it: lr_scheduler.MultiplicativeLR(it, lambda step: 0.9),
    "PolynomialLR": lambda it: lr_scheduler.PolynomialLR(it, 20),
    "CosineAnnealingWarmRestarts": lambda it: lr_scheduler.CosineAnnealingWarmRestarts(it, 4),
}


def rates_with_nan(folder: Path, name: str, on_nan: str, checkpoint: Path | None = None) -> tuple[list[float], Any]:
    """Returns the rate of each step, and the events."""
    make, rates, events = ANY_SCHEDULER[name], Rates(), list[Any]()
    torch.manual_seed(3)
    model = NanInTwoSteps()
    model.calls = 0 if checkpoint is None else 100
    module = tiny.module(
        model=model,
        on_nan=on_nan,
        scheduling=None if make is None else Scheduling(make, "step", None),
        on_event=lambda kind, **facts: events.append((kind, facts["action"])),
    )
    trainer = tiny.fit(module, folder, [rates], max_steps=14 if checkpoint else 8, checkpoint=checkpoint)
    if checkpoint is None:
        trainer.save_checkpoint(folder / "at_8.ckpt")
    return rates.seen, events


FAST = ("factor", "OneCycleLR", "SequentialLR")


@pytest.mark.parametrize("name", [*FAST, *(slow(n) for n in ANY_SCHEDULER if n not in FAST)])
def test_a_halved_rate_stays_halved_with_any_scheduler_and_when_resumed(tmp_path: Path, name: str) -> None:
    plain, _ = rates_with_nan(tmp_path, name, "skip")
    later, _ = rates_with_nan(tmp_path, name, "skip", tmp_path / "at_8.ckpt")
    halved, events = rates_with_nan(tmp_path, name, "halve_lr")
    halved_later, _ = rates_with_nan(tmp_path, name, "halve_lr", tmp_path / "at_8.ckpt")
    assert events == [("nan", "halve_lr")] * 2
    assert halved[:4] == plain[:4]
    assert halved[4] == plain[4] / 2
    assert halved[5:] == [rate / 4 for rate in plain[5:]]
    assert halved_later == [rate / 4 for rate in later]


def test_a_figure_that_nobody_logs_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        Exception, match=r"workload.schedule.monitor=val/x: no figure is called val/x. There are: .*val/loss"
    ):
        trained(tmp_path, Scheduling(plateau, None, "val/x"), max_epochs=1)


@pytest.mark.parametrize(
    ("make", "monitor", "problem"),
    [
        (plateau, None, "monitor=null: ReduceLROnPlateau goes by a figure"),
        (lr_scheduler.ConstantLR, "val/loss", "monitor=val/loss: ConstantLR does not go by a figure"),
    ],
)
def test_a_figure_goes_with_a_plateau(make: Any, monitor: str | None, problem: str) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    with pytest.raises(ConfigError, match=problem):
        Scheduling(make, None, monitor).of(optimizer)


def test_a_cycle_goes_by_steps_unless_told() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    cycle = Scheduling(lambda it: lr_scheduler.OneCycleLR(it, 0.1, total_steps=5), None, None)
    assert cycle.of(optimizer)["interval"] == "step"


def test_a_schedule_that_is_over_before_the_training_is_told(tmp_path: Path) -> None:
    cycle = Scheduling(lambda it: lr_scheduler.OneCycleLR(it, 0.1, total_steps=4), None, None)
    with pytest.raises(WellfedError, match=r"workload.schedule \(OneCycleLR\): Tried to step 5 times"):
        trained(tmp_path, cycle, max_epochs=2)


def test_a_training_that_is_only_timed_has_no_schedule(tmp_path: Path) -> None:
    module = tiny.module(scheduling=Scheduling(plateau, None, "val/loss"))
    with module.plain.only_timed():
        tiny.fit(module, tmp_path, max_steps=4)
    assert module.plain.scheduling is not None


def test_linear_falls_evenly_to_its_floor_after_the_warm_up() -> None:
    schedule = Schedule("linear", 4, 0.1, 104)
    assert [schedule(step) for step in (3, 4, 54, 104, 200)] == pytest.approx([0.8, 1.0, 0.55, 0.1, 0.1])
