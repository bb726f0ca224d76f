"""A card without memory for batches ahead: each batch is still trained on once."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from tests.kit import tiny
from wellfed import batches
from wellfed.data.device_prefetch import DevicePrefetcher
from wellfed.observe.timing.step_clock import StepClock
from wellfed.train.lightning.callbacks.clock import TimedLoader
from wellfed.train.lightning.prefetch import no_room, prefetched

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")
CPU = torch.device("cpu")


class Sometimes:
    """Copies to a device that runs out of memory at some calls."""

    def __init__(self, fails: set[int]) -> None:
        self._fails, self.calls = fails, 0

    def __call__(self, batch: Any, device: torch.device) -> Any:
        self.calls += 1
        if self.calls in self._fails:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB\nsecond line")
        return batches.to_device(batch, device)


@pytest.mark.parametrize("fails", [{1}, {2, 3}, set(range(1, 100))])
@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_every_batch_comes_once_and_in_order(ahead: int, fails: set[int]) -> None:
    loader = tiny.loader(batch_size=7)
    expected = [delivery.batch["x"].tolist() for delivery in tiny.loader(batch_size=7)]
    prefetcher = DevicePrefetcher(loader, CPU, ahead, move=Sometimes(fails), no_room=no_room)
    for _ in range(2):
        found = [delivery.batch["x"].tolist() for delivery in prefetcher]
        assert len(found) == len(expected) == 10
        if not prefetcher.state_dict()["epoch"]:
            assert found == expected
    prefetcher.close()


class Large(tiny.TinyData):
    """Data of one mebibyte per sample."""

    def fetch(self, indices: Any, rng: Any) -> Any:
        return {**super().fetch(indices, rng), "padding": torch.zeros(len(indices), 2**18)}


class Seen(pl.Callback):
    def __init__(self) -> None:
        self.ids: list[float] = []
        self.on_card: list[bool] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.ids += batch.batch["x"][:, 0].tolist()
        self.on_card.append(batch.batch["x"].is_cuda)


@pytest.mark.simulated(cards=1, mib=100, slowdown=2)
def test_a_card_with_room_for_two_batches(tmp_path: Path) -> None:
    import fake_cuda

    results, events = [], []
    for ahead, mib in ((0, 100), (3, 70), (3, 20)):  # batches of 32 MiB; in 20 only parts of one fit
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(mib / 100)
        events.clear()
        module, seen = tiny.module(on_event=lambda kind, **facts: events.append((kind, facts))), Seen()
        module.plain.make_optimizer = lambda model: torch.optim.SGD(model.parameters(), lr=0.05)
        with prefetched(tiny.loader(data=Large()), module, torch.device("cuda", 0), ahead) as ahead_of_it:
            loader = TimedLoader(ahead_of_it, StepClock())
            tiny.fit(module, tmp_path, [seen], batches=loader, accelerator="gpu", max_epochs=2, max_steps=None)
        results.append((seen.ids, tiny.weights(module).cpu()))
    assert results[0][0] == results[1][0] == results[2][0]
    assert len(results[0][0]) == 2 * tiny.NUM_SAMPLES
    for _, weights in results[1:]:
        assert (weights - results[0][1]).norm() / weights.norm() < 1e-5
    changes = [facts.get("change", facts.get("micro_batch")) for kind, facts in events if kind != "oom"]
    assert 16 in changes
    assert not all(seen.on_card)
    assert not fake_cuda.driver.violations()
