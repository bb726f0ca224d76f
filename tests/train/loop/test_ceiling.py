"""The ceiling uses the card and whole batches, and restores all state."""

import random
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.kit import loop, tiny
from wellfed.batches import Delivery
from wellfed.contract import LossOutput
from wellfed.errors import OutOfMemoryExhausted
from wellfed.observe.timing.readiness import StepSummary, summarise
from wellfed.observe.timing.step_clock import StepClock, StepRow
from wellfed.run.passes.base import clock_of
from wellfed.train.loop.ceiling import CEILING_BATCHES, CachedBatches, run_ceiling, whole
from wellfed.train.loop.place import Place
from wellfed.train.loop.placed_model import PlacedModel
from wellfed.train.loop.training import Watchers


def few(batch_size: int = 16) -> list[Delivery]:
    return list(islice(tiny.loader(batch_size=batch_size), CEILING_BATCHES))


def generators() -> list[Any]:
    return [torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()]


# -- what it measures --------------------------------------------------------------------------------------------------


def test_it_times_so_many_steps_on_these_batches() -> None:
    placed = loop.model()
    summary = run_ceiling(placed, few(8), 12, StepClock())
    assert summary is not None
    assert (summary.steps, summary.warmup_steps) == (12, 3)
    assert summary.samples_per_s > 0
    assert set(placed.model.seen) == {8}
    assert run_ceiling(placed, [], 12, StepClock()) is None


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
        return LossOutput(x.square().mean())


def measured(placed: PlacedModel, loader: Any, steps: int) -> StepSummary:
    """Returns the rate of training as a run measures it."""
    rows: list[StepRow] = []
    watchers = Watchers(take_rows=rows.extend)
    loop.fit(placed, loader, clock=clock_of(is_on_gpu=True), watchers=watchers, max_steps=steps)
    found = summarise(rows)
    assert found is not None
    return found


@pytest.mark.slow
@pytest.mark.simulated(cards=1, kernel_us=500, timeout_s=120)  # a card's time, not that of a shared host
def test_where_the_card_is_the_bottleneck_the_ceiling_is_the_rate() -> None:
    import fake_cuda

    placed = loop.model(model=ManyKernels(), micro=64)
    placed.place = Place("gpu")
    data = tiny.TinyData(64 * 8)
    rate = measured(placed, tiny.loader(64, data), 40).samples_per_s
    placed.model.devices.clear()
    before = fake_cuda.driver.counts()
    summary = run_ceiling(placed, list(islice(tiny.loader(64, data), 4)), 30, clock_of(is_on_gpu=True))
    copies = fake_cuda.driver.counts()["to_card"] - before["to_card"]
    assert summary is not None
    assert summary.time["copy_frac"] is not None  # timed by the card's own events
    assert placed.model.devices == {"cuda"}
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


def test_weights_buffers_generators_and_counts_are_as_before() -> None:
    events: list[str] = []
    placed = loop.model(model=Counting(), on_event=lambda kind, **facts: events.append(kind))
    loop.fit(placed, max_steps=3)
    weights, drawn, options, totals = loop.weights(placed), generators(), placed.options, placed.totals
    totals.forget()
    totals.add("loss", torch.tensor(1.0), 1)
    placed.model.eval()
    assert run_ceiling(placed, few(), 5, StepClock()) is not None
    assert torch.equal(loop.weights(placed), weights)
    assert float(placed.model.steps) == 3
    assert generators() == drawn
    assert placed.options is options
    assert not placed.model.training
    assert all(parameter.grad is None for parameter in placed.model.parameters())
    totals.commit()
    assert totals.take() == {"loss": 1.0}
    assert events == []


def test_so_they_are_where_it_fails() -> None:
    def fail(size: int, calls: int) -> BaseException | None:
        return torch.OutOfMemoryError("CUDA out of memory.") if calls > 4 else None

    events: list[str] = []
    placed = loop.model(fail=fail, on_event=lambda kind, **facts: events.append(kind))
    weights, drawn = loop.weights(placed), generators()
    with pytest.raises(OutOfMemoryExhausted):
        run_ceiling(placed, few(), 5, StepClock())
    assert torch.equal(loop.weights(placed), weights)
    assert generators() == drawn
    assert placed.micro.size == 32
    assert events == []
