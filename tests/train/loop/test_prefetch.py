"""Batches ahead of the step are those without, also where a card has no memory for them."""

import threading
from functools import partial
from typing import Any

import pytest
import torch

from tests.kit import loop, tiny
from wellfed import batches
from wellfed.data.device_prefetch import DevicePrefetcher
from wellfed.train.loop.place import Place
from wellfed.train.memory import oom

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
    prefetcher = DevicePrefetcher(
        loader, CPU, ahead, move=Sometimes(fails), no_room=lambda error: oom.classify(error) is not None
    )
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


@pytest.mark.simulated(cards=1, mib=100, slowdown=2)
def test_a_card_with_room_for_two_batches() -> None:
    import fake_cuda

    results, events, ids, on_card = [], [], list[float](), list[bool]()

    def see(bring: Any, delivery: Any) -> None:
        ids.extend(delivery.batch["x"][:, 0].tolist())
        on_card.append(delivery.batch["x"].is_cuda)
        bring(delivery)

    for ahead, mib in ((0, 100), (3, 70), (3, 20)):  # batches of 32 MiB; in 20 only parts of one fit
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(mib / 100)
        for told in (events, ids, on_card):
            told.clear()
        placed = loop.model(on_event=lambda kind, **facts: events.append((kind, facts)))
        placed.place = Place("gpu")
        placed.make_optimizer = lambda model: torch.optim.SGD(model.parameters(), lr=0.05)
        with placed.prefetched(tiny.loader(data=Large()), ahead, is_training=True) as loader:
            placed.bring = partial(see, placed.bring)
            loop.fit(placed, loader, max_epochs=2, max_steps=None)
        results.append((ids.copy(), loop.weights(placed).cpu()))
        del placed, loader
    assert results[0][0] == results[1][0] == results[2][0]
    assert len(results[0][0]) == 2 * tiny.NUM_SAMPLES
    for _, weights in results[1:]:
        assert (weights - results[0][1]).norm() / weights.norm() < 1e-5
    changes = [facts.get("change", facts.get("micro_batch")) for kind, facts in events if kind != "oom"]
    assert 16 in changes
    assert not all(on_card)
    assert not fake_cuda.driver.violations()


def train(ahead: int, model: Any = None) -> torch.Tensor:
    placed = loop.model(dropout=0.2, model=model)
    with placed.prefetched(tiny.loader(), ahead, is_training=True) as loader:
        loop.fit(placed, loader, max_steps=7)
    return loop.weights(placed)


def test_training_is_the_same_bit_for_bit() -> None:
    expected = train(0)
    for ahead in (1, 3):
        assert torch.equal(train(ahead), expected)


def test_an_error_in_training_stops_what_reads_ahead() -> None:
    class Breaks(tiny.TinyModel):
        def loss(self, batch: Any) -> Any:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train(2, Breaks())
    assert not [thread for thread in threading.enumerate() if thread.name == "wellfed-device-prefetch"]
