"""Phases of a LightningModule's steps: whole batches, parts of one, and what is unknown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from tests.kit import tiny
from tests.train.loop.test_timing import MadeClock
from wellfed.batches import split
from wellfed.observe.timing.step_clock import StepClock, StepRow
from wellfed.train.lightning.callbacks.clock import Clock, ModulePhases, TimedLoader
from wellfed.train.lightning.user_module.additions import make_user_trainer

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
    """A module that calls its optimizer itself."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.automatic_optimization = False

    def training_step(self, batch: Any) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss_of(batch))
        optimizer.step()


class Raw(Guest):
    """A module that unwraps Lightning's optimizer."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.optimizer.step(optimizer_closure)


def timed(folder: Path, module: Guest, parts: int = 1) -> list[StepRow]:
    """Returns all rows but the first, whose marks begin with the optimizer."""
    rows: list[StepRow] = []
    clock = StepClock(now_s=module.clock)
    loader = TimedLoader(tiny.loader(), clock, unwrap=True, num_parts=parts, split=split)
    callbacks = [Clock(clock, rows.extend), ModulePhases(clock)]
    trainer = make_user_trainer(tiny.options(max_steps=12, accumulate=parts), callbacks, folder, loggers=[])
    trainer.fit(module, loader)
    assert rows[0].forward_ms is None
    return rows[1:]


def times_of(row: StepRow) -> dict[str, float]:
    found = {name: getattr(row, name) for name in ("forward_ms", "backward_ms", "optimizer_ms")}
    return {**found, "other": row.compute_ms - sum(found.values())}


@pytest.mark.parametrize("where", ["forward_ms", "backward_ms", "optimizer_ms"])
def test_a_planted_delay_is_found_in_its_phase(tmp_path: Path, where: str) -> None:
    for row in timed(tmp_path, Guest(MadeClock(), where)):
        times_ms = times_of(row)
        assert 60 <= times_ms.pop(where) < 63
        assert all(0 <= took < 3 for took in times_ms.values())


def test_parts_of_a_batch_are_summed(tmp_path: Path) -> None:
    rows = timed(tmp_path, Guest(MadeClock(), "forward_ms", "backward_ms"), parts=3)
    for row in rows:
        assert row.num_micro == 3
        times_ms = times_of(row)
        assert 180 <= times_ms["forward_ms"] < 185
        assert 180 <= times_ms["backward_ms"] < 185
        assert times_ms["optimizer_ms"] < 3


@pytest.mark.parametrize("kind", [Manual, Raw])
def test_steps_that_lightning_does_not_make_leave_all_phases_unknown(tmp_path: Path, kind: type[Guest]) -> None:
    rows = timed(tmp_path, kind(MadeClock(), "backward_ms"))
    assert {(row.forward_ms, row.backward_ms, row.optimizer_ms) for row in rows} == {(None, None, None)}
