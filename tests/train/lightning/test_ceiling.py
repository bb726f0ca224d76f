"""The ceiling uses the card and whole batches, and restores all state."""

import random
from itertools import islice
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from torch import Tensor, nn

from tests.kit import tiny
from wellfed.batches import Delivery
from wellfed.errors import OutOfMemoryExhausted
from wellfed.observe.timing.readiness import StepSummary, summarise
from wellfed.observe.timing.step_clock import StepRow
from wellfed.train.lightning import trainer as lit
from wellfed.train.lightning.callbacks.clock import Clock, TimedLoader
from wellfed.train.lightning.ceiling import CEILING_BATCHES, CachedBatches, run_ceiling, whole
from wellfed.train.lightning.module import StepModule

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")


def few(batch_size: int = 16) -> list[Delivery]:
    return list(islice(tiny.loader(batch_size=batch_size), CEILING_BATCHES))


def generators() -> list[Any]:
    return [torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()]


# -- what it measures --------------------------------------------------------------------------------------------------


def test_it_times_so_many_steps_on_these_batches(tmp_path: Path) -> None:
    module = tiny.module()
    summary = run_ceiling(module, few(8), tiny.options(), 12, tmp_path)
    assert summary is not None
    assert (summary.steps, summary.warmup_steps) == (12, 3)
    assert summary.samples_per_s > 0
    assert set(module.model.seen) == {8}
    assert run_ceiling(module, [], tiny.options(), 12, tmp_path) is None


def test_the_ragged_end_of_an_epoch_is_left_out_unless_it_is_all_there_is() -> None:
    assert [delivery.total for delivery in few(32)] == [32, 32, 6]
    assert [delivery.total for delivery in whole(few(32))] == [32, 32]
    assert [delivery.total for delivery in whole(few(100))] == [70]
    assert whole([]) == []


def test_batches_take_turns_and_come_whole_whatever_a_step_does_to_them() -> None:
    first, second = Delivery({"x": torch.zeros(2)}, 0, 0, 2), Delivery({"x": torch.ones(2)}, 0, 1, 2)
    firsts = [float(delivery.batch.pop("x")[0]) for delivery in CachedBatches([first, second], 5)]
    assert firsts == [0, 1, 0, 1, 0]


class ManyKernels(nn.Module):
    """A model with many kernels a step, for which a slow card lags behind the host."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.head = nn.Linear(tiny.WIDTH, 32)
        self.devices: set[str] = set()

    def loss(self, batch: dict[str, Tensor]) -> Any:
        self.devices |= {batch["x"].device.type, self.head.weight.device.type}
        x = self.head(batch["x"])
        for layer in self.layers:
            x = torch.relu(layer(x))
        return tiny.LossOutput(x.square().mean())


def measured(module: StepModule, loader: Any, folder: Path, steps: int) -> StepSummary:
    """Returns the rate of training as a run measures it."""
    rows: list[StepRow] = []
    options = tiny.options(accelerator="gpu", max_steps=steps)
    clock = lit.clock_of(torch.device("cuda", 0))
    trainer = lit.make_trainer(options, [Clock(clock, rows.extend)], folder)
    lit.fit(trainer, module, TimedLoader(loader, clock), None, None)
    found = summarise(rows)
    assert found is not None
    return found


@pytest.mark.slow
@pytest.mark.simulated(cards=1, kernel_us=500, timeout_s=120)  # a card's time, not that of a shared host
def test_where_the_card_is_the_bottleneck_the_ceiling_is_the_rate(tmp_path: Path) -> None:
    import fake_cuda

    module = tiny.module(model=ManyKernels(), micro=64)
    data = tiny.TinyData(64 * 8)
    rate = measured(module, tiny.loader(64, data), tmp_path, 40).samples_per_s
    assert module.device.type == "cpu"  # a fit ends so, and on the CPU nothing of this would be true
    module.model.devices.clear()
    before = fake_cuda.driver.counts()
    summary = run_ceiling(module, list(islice(tiny.loader(64, data), 4)), tiny.options(accelerator="gpu"), 30, tmp_path)
    copies = fake_cuda.driver.counts()["to_card"] - before["to_card"]
    assert summary is not None
    assert summary.time["copy_frac"] is not None  # timed by the card's own events
    assert module.model.devices == {"cuda"}
    assert copies < 50  # weights and batches once; with one a step there would be 33 more
    assert summary.samples_per_s == pytest.approx(rate, rel=0.1)
    assert fake_cuda.driver.violations() == []


# -- what it leaves as it was ------------------------------------------------------------------------------------------


class Counting(tiny.TinyModel):
    """A model that counts steps in a buffer outside of checkpoints, and draws from three generators."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5)
        self.register_buffer("steps", torch.zeros(()), persistent=False)

    def loss(self, batch: dict[str, Tensor]) -> Any:
        self.steps += 1
        random.random(), np.random.random()
        return super().loss(batch)


def test_weights_buffers_generators_and_counts_are_as_before(tmp_path: Path) -> None:
    events: list[str] = []
    module = tiny.module(model=Counting(), on_event=lambda kind, **facts: events.append(kind))
    tiny.fit(module, tmp_path, max_steps=3)
    trainer, weights, drawn, options = module.trainer, tiny.weights(module), generators(), module.plain.options
    module.plain.totals.forget()
    module.plain.totals.add("loss", torch.tensor(1.0), 1)
    module.eval()
    assert run_ceiling(module, few(), tiny.options(), 5, tmp_path) is not None
    assert torch.equal(tiny.weights(module), weights)
    assert float(module.model.steps) == 3
    assert generators() == drawn
    assert module.trainer is trainer
    assert module.plain.options is options
    assert not module.training
    assert all(parameter.grad is None for parameter in module.parameters())
    module.plain.totals.commit()
    assert module.plain.totals.take() == {"loss": 1.0}
    assert events == []


def test_so_they_are_where_it_fails(tmp_path: Path) -> None:
    def fail(size: int, calls: int) -> BaseException | None:
        return torch.OutOfMemoryError("CUDA out of memory.") if calls > 4 else None

    events: list[str] = []
    module = tiny.module(fail=fail, on_event=lambda kind, **facts: events.append(kind))
    weights, drawn = tiny.weights(module), generators()
    with pytest.raises(OutOfMemoryExhausted):
        run_ceiling(module, few(), tiny.options(), 5, tmp_path)
    assert torch.equal(tiny.weights(module), weights)
    assert generators() == drawn
    assert module.plain.micro.size == 32
    assert events == []


# -- a user's LightningModule ------------------------------------------------------------------------------------------


class Guest(pl.LightningModule):
    """A module with hooks around each step."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.called, self.moved = tiny.TinyModel(), [], 0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.logger.experiment.add_scalar("x", 1.0)
        residual = self.model(batch).squeeze(1) - batch.pop("y").squeeze(1)
        self.log("train_loss", residual.square().mean())
        return residual.square().mean()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.called.append("validation_step")

    def val_dataloader(self) -> Any:
        return [{"x": torch.zeros(2, tiny.WIDTH), "y": torch.zeros(2, 1)}]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}

    def configure_callbacks(self) -> list[pl.Callback]:
        return [EarlyStopping("val_loss"), LearningRateMonitor()]

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.moved += 1
        return {**batch, "x": batch["x"] * 2}

    def __getattribute__(self, name: str) -> Any:
        watched = ("on_train_start", "on_train_end", "on_train_batch_end", "on_train_epoch_end", "on_fit_start")
        if name in watched and name not in object.__getattribute__(self, "__dict__"):
            object.__getattribute__(self, "called").append(name)
        return super().__getattribute__(name)


def test_of_a_users_module_nothing_is_called_but_its_steps(tmp_path: Path) -> None:
    module = Guest()
    module.called.clear()
    weights = tiny.weights(module)
    summary = run_ceiling(module, few(), tiny.options(), 5, tmp_path)
    assert summary is not None
    assert summary.steps == 5
    assert module.called == []
    assert module.moved == CEILING_BATCHES
    assert module.model.calls == 0
    assert torch.equal(tiny.weights(module), weights)
    assert [name for name in vars(module) if name.startswith(("on_", "configure", "transfer"))] == []
