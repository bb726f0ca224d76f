from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from tests.kit import loop, tiny
from tests.kit.few import slow
from wellfed.errors import ConfigError, WellfedError
from wellfed.observe.timing.step_clock import StepClock
from wellfed.train.loop.ceiling import run_ceiling
from wellfed.train.loop.figures import Figures
from wellfed.train.plain_model.scheduling import Schedule, Scheduling


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


class Sgd(torch.optim.SGD):
    """An optimizer that records the rate of each step."""

    seen: ClassVar[list[float]] = []

    def step(self, closure: Any = None) -> Any:
        self.seen.append(self.param_groups[0]["lr"])
        return super().step(closure)


def trained(folder: Path, scheduling: Scheduling, checkpoint: Path | None = None, **changes: Any) -> Any:
    """Trains three steps an epoch; returns rates, weights and written metrics."""
    told: list[Any] = []
    figures = Figures(lambda split, values, **_: told.append((split, dict(values))), every=2, stops_on_nan=True)
    kept = loop.checkpoints(folder, every_steps=changes.pop("save_every", None), keep_last=9)
    placed = loop.model(scheduling=scheduling, optimizer=Sgd)
    Sgd.seen.clear()
    more = {"figures": figures, "checkpoints": kept, "validation": tiny.eval_loader(), "max_steps": None}
    loop.fit(placed, checkpoint=checkpoint, **{**more, **changes})
    return Sgd.seen.copy(), loop.weights(placed), told


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


def test_a_checkpoint_of_another_kind_of_schedule_is_refused(tmp_path: Path) -> None:
    def halving(optimizer: Any) -> Any:
        return lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    loop.fit(
        loop.model(scheduling=Scheduling(plateau, "epoch", "val/loss")),
        **{
            "checkpoints": loop.checkpoints(tmp_path),
            "max_steps": 2,
            "figures": loop.figures(),
            "validation": tiny.eval_loader(),
        },
    )
    for scheduling, now in ((Scheduling(halving, "step", None), "StepLR"), (None, "workload.schedule.name")):
        with pytest.raises(ConfigError, match=f"set by ReduceLROnPlateau until this checkpoint, and now by {now}"):
            loop.fit(loop.model(scheduling=scheduling), checkpoint=tmp_path / "last.ckpt")


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


def test_a_training_that_is_only_timed_has_no_schedule() -> None:
    placed = loop.model(scheduling=Scheduling(plateau, None, "val/loss"))
    assert run_ceiling(placed, list(tiny.loader()), 4, StepClock()) is not None
    assert placed.scheduling is not None


def test_linear_falls_evenly_to_its_floor_after_the_warm_up() -> None:
    schedule = Schedule("linear", 4, 0.1, 104)
    assert [schedule(step) for step in (3, 4, 54, 104, 200)] == pytest.approx([0.8, 1.0, 0.55, 0.1, 0.1])
