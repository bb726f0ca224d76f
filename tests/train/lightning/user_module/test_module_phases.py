"""Phases of a LightningModule's steps: automatic and manual optimization, parts of a batch, and what is unknown."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from tests.kit import tiny
from tests.train.lightning.callbacks.test_clock import MadeClock, Scaler
from wellfed.batches import split
from wellfed.observe.timing.step_clock import StepClock, StepRow
from wellfed.train.lightning.callbacks.clock import Clock, TimedLoader
from wellfed.train.lightning.user_module.accumulation import InParts
from wellfed.train.lightning.user_module.additions import make_user_trainer
from wellfed.train.lightning.user_module.module_phases import ModulePhases

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")


class Guest(pl.LightningModule):
    """A module that pauses in the phases that tests name."""

    def __init__(self, clock: MadeClock, *slow: str) -> None:
        super().__init__()
        self.clock, self.slow = clock, slow
        self.net = nn.Linear(tiny.WIDTH, 1)

    def pause(self, where: str) -> None:
        if where in self.slow:
            self.clock.pause()

    def loss_of(self, batch: Any) -> Tensor:
        self.pause("forward_ms")
        loss = (self.net(batch["x"]) - batch["y"]).square().mean()
        loss.register_hook(lambda gradient: self.pause("backward_ms"))
        return loss

    def training_step(self, batch: Any) -> Tensor | None:
        return self.loss_of(batch)

    def configure_optimizers(self) -> Any:
        module = self

        class Slow(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                found = super().step(closure)
                module.pause("optimizer_ms")
                return found

        return Slow(self.parameters(), lr=0.01)


class Manual(Guest):
    """Two losses and two steps of the optimizer a batch."""

    def __init__(self, *given: Any, is_raw: bool = False) -> None:
        super().__init__(*given)
        self.automatic_optimization, self.is_raw = False, is_raw

    def training_step(self, batch: Any) -> None:
        optimizer: Any = self.optimizers()
        for _ in range(2):
            loss = self.loss_of(batch)
            optimizer.zero_grad()
            if self.is_raw:
                loss.backward()
            else:
                self.manual_backward(loss)
            optimizer.step()


class Stopping(Guest):
    def training_step(self, batch: Any) -> Tensor | None:
        raise ValueError("stop")


def timed(folder: Path, module: Guest, parts: int = 1, precision: Any = None) -> list[StepRow]:
    """Returns all rows but the first, whose marks begin with the optimizer."""
    rows: list[StepRow] = []
    clock = StepClock(now_s=module.clock)
    loader: Any = TimedLoader(tiny.loader(), clock, unwrap=True)
    if parts > 1:
        loader = InParts(loader, parts, split)
    callbacks = [Clock(clock, rows.extend), ModulePhases(clock)]
    trainer = make_user_trainer(tiny.options(max_steps=12, accumulate=parts), callbacks, folder, loggers=[])
    if precision is not None:  # options would take bf16 on a CPU
        trainer.strategy._precision_plugin = precision
    try:
        trainer.fit(module, loader)
    finally:  # also of a training that failed
        assert not {"training_step", "optimizer_step"} & vars(trainer.strategy).keys()
    assert rows[0].forward_ms is None
    return rows[1:]


def times_of(row: StepRow) -> dict[str, float]:
    found = {name: getattr(row, name) for name in ("forward_ms", "backward_ms", "optimizer_ms")}
    return {**found, "other": row.compute_ms - sum(found.values())}


@pytest.mark.parametrize("where", ["forward_ms", "backward_ms", "optimizer_ms"])
@pytest.mark.parametrize(("kind", "pauses"), [(Guest, 1), (Manual, 2)])
def test_a_planted_delay_is_found_in_its_phase(tmp_path: Path, kind: type[Guest], pauses: int, where: str) -> None:
    for row in timed(tmp_path, kind(MadeClock(), where)):
        times_ms = times_of(row)
        assert 60 * pauses <= times_ms.pop(where) < 60 * pauses + 3
        assert all(0 <= took < 3 for took in times_ms.values())


def test_parts_of_a_batch_are_summed(tmp_path: Path) -> None:
    rows = timed(tmp_path, Guest(MadeClock(), "forward_ms", "backward_ms"), parts=3)
    for row in rows:
        assert row.num_micro == 3
        times_ms = times_of(row)
        assert 180 <= times_ms["forward_ms"] < 185
        assert 180 <= times_ms["backward_ms"] < 185
        assert times_ms["optimizer_ms"] < 3


def test_a_backward_pass_that_is_not_seen_leaves_all_phases_unknown(tmp_path: Path) -> None:
    rows = timed(tmp_path, Manual(MadeClock(), "backward_ms", is_raw=True))
    assert {(row.forward_ms, row.backward_ms, row.optimizer_ms) for row in rows} == {(None, None, None)}


class Wrapper:
    """An optimizer by Lightning's protocol alone, as wrappers are that call no constructor of torch."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("register_"):
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class Wrapped(Guest):
    def configure_optimizers(self) -> Any:
        return Wrapper(super().configure_optimizers())


@pytest.mark.parametrize("where", ["forward_ms", "backward_ms", "optimizer_ms"])
def test_an_optimizer_without_hooks_is_timed_too(tmp_path: Path, where: str) -> None:
    for row in timed(tmp_path, Wrapped(MadeClock(), where)):
        times_ms = times_of(row)
        assert times_ms.pop(where) >= 60
        assert all(0 <= took < 3 for took in times_ms.values())


class Adversarial(Manual):
    """Two losses, of which one is derived without Lightning."""

    def training_step(self, batch: Any) -> None:
        optimizer: Any = self.optimizers()
        for derive in (self.manual_backward, Tensor.backward):
            optimizer.zero_grad()
            derive(self.loss_of(batch))
            optimizer.step()


class Accumulating(Manual):
    """A module that steps its optimizer after each second batch, before it computes the next."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        if batch_idx % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        self.manual_backward(self.loss_of(batch))


def test_one_unseen_backward_pass_of_two_leaves_all_phases_unknown(tmp_path: Path) -> None:
    rows = timed(tmp_path, Adversarial(MadeClock(), "backward_ms"))
    assert {(row.forward_ms, row.backward_ms, row.optimizer_ms) for row in rows} == {(None, None, None)}


def test_gradients_of_several_batches_are_timed(tmp_path: Path) -> None:
    rows = timed(tmp_path, Accumulating(MadeClock(), "backward_ms", "optimizer_ms"))
    assert len(rows) > 10
    for row in rows:
        times_ms = times_of(row)
        assert 60 <= times_ms["backward_ms"] < 63
        assert times_ms["forward_ms"] < 3
    assert {round(row.optimizer_ms or 0, -1) for row in rows} == {0, 60}


class Raw(Guest):
    """A module that unwraps Lightning's optimizer."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.optimizer.step(optimizer_closure)


def test_an_optimizer_that_is_not_seen_leaves_all_phases_unknown(tmp_path: Path) -> None:
    rows = timed(tmp_path, Raw(MadeClock(), "optimizer_ms"))
    assert {(row.forward_ms, row.backward_ms, row.optimizer_ms) for row in rows} == {(None, None, None)}


class Failing(Manual):
    """A module that survives an optimizer's step that raises."""

    def training_step(self, batch: Any) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss_of(batch))
        if self.trainer.global_step == 2:
            with pytest.raises(ArithmeticError):
                optimizer.step(closure=self.fail)
            self.manual_backward(self.loss_of(batch))
        optimizer.step()
        self.pause("after")

    def fail(self) -> None:
        raise ArithmeticError


def test_a_step_of_the_optimizer_that_raises_ends_its_phase(tmp_path: Path) -> None:
    for row in timed(tmp_path, Failing(MadeClock(), "after")):
        times_ms = times_of(row)
        assert times_ms.pop("forward_ms") >= 60
        assert all(0 <= took < 3 for took in times_ms.values())


class Overflowing(Guest):
    """A module with infinite gradients in each third step."""

    def loss_of(self, batch: Any) -> Tensor:
        return super().loss_of(batch) * (torch.inf if self.trainer.global_step % 3 == 2 else 1)


class OverflowingByHand(Overflowing):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.automatic_optimization = False

    def training_step(self, batch: Any) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss_of(batch))
        optimizer.step()
        self.pause("forward_ms")


@pytest.mark.parametrize("kind", [Overflowing, OverflowingByHand])
def test_unscaling_is_the_optimizers_also_if_it_skips_a_step(tmp_path: Path, kind: type[Guest]) -> None:
    module = kind(MadeClock(), "forward_ms")
    pauses = 2 if kind is OverflowingByHand else 1
    rows = timed(tmp_path, module, precision=MixedPrecision("16-mixed", "cpu", Scaler(module.clock)))
    for row in rows:
        times_ms = times_of(row)
        assert 60 * pauses <= times_ms.pop("forward_ms") < 60 * pauses + 3
        assert 60 <= times_ms.pop("optimizer_ms") < 63
        assert all(0 <= took < 3 for took in times_ms.values())


class Copying(Guest):
    """A module that computes its loss with a copy, as teachers and averaged weights are made."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.agree: list[bool] = []

    def training_step(self, batch: Any) -> Tensor:
        if self.training and not hasattr(self, "is_copy"):
            copied = copy.deepcopy(self)
            copied.is_copy = True
            with torch.no_grad():
                copied.net.bias += 100
            self.agree.append(bool(copied.training_step(batch) == self.loss_of(batch)))
        return self.loss_of(batch)


def test_a_copy_of_the_module_runs_on_its_own_weights(tmp_path: Path) -> None:
    module = Copying(MadeClock())
    timed(tmp_path, module)
    assert len(module.agree) == 12
    assert not any(module.agree)


class Recording(Manual):
    """A module whose first backward pass runs while the device records a graph, as far as torch says."""

    is_recording = is_starting = False

    def on_fit_start(self) -> None:
        self.is_starting = True

    def on_train_start(self) -> None:  # after the callbacks'
        self.is_starting = False

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if self.is_starting else "cpu")

    def training_step(self, batch: Any) -> None:
        optimizer: Any = self.optimizers()
        Recording.is_recording = True
        self.manual_backward(self.loss_of(batch))
        Recording.is_recording = False
        self.manual_backward(self.loss_of(batch))
        optimizer.step()


def test_nothing_is_marked_while_the_device_records_a_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: Recording.is_recording)
    for row in timed(tmp_path, Recording(MadeClock(), "backward_ms")):
        times_ms = times_of(row)
        assert 60 <= times_ms["backward_ms"] < 63
        assert 60 <= times_ms["forward_ms"] < 63


def test_the_module_is_as_before_afterwards(tmp_path: Path) -> None:
    module = Guest(MadeClock())
    timed(tmp_path, module)
    assert "training_step" not in vars(module)
    failing = Stopping(MadeClock())
    with pytest.raises(ValueError, match="stop"):
        timed(tmp_path, failing)
    assert "training_step" not in vars(failing)
