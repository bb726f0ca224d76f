"""The batch of a step in parts, whose summed gradients equal that of the whole batch."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from wellfed.batches import Delivery
from wellfed.data.own_loader import UNKNOWN_LENGTH
from wellfed.observe.timing.step_clock import StepClock
from wellfed.train.lightning.callbacks.clock import TimedLoader, is_within_step
from wellfed.train.lightning.user_module.additions import SchedulersOfParts, weighing_parts
from wellfed.train.step.micro_batches import Preparation


class Steps:
    """A loader of batches of these sizes, with consecutive numbers."""

    def __init__(self, *sizes: int, length: int | None = None) -> None:
        self._sizes, self._length = sizes, len(sizes) if length is None else length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Delivery]:
        for number, batch in enumerate(torch.arange(sum(self._sizes)).split(list(self._sizes))):
            is_last = number == len(self._sizes) - 1
            yield Delivery({"x": batch}, epoch=0, index=number, total=len(batch), is_last=is_last)


def in_parts(num_parts: int, *sizes: int, **more: Any) -> TimedLoader:
    split = Preparation(None, 0).split
    return TimedLoader(Steps(*sizes, **more), StepClock(), unwrap=True, num_parts=num_parts, split=split)


@pytest.mark.parametrize(("num_parts", "sizes"), [(2, (8, 4)), (3, (8, 8, 5)), (4, (4, 3, 1)), (8, (8, 3))])
def test_each_sample_counts_once(num_parts: int, sizes: tuple[int, ...]) -> None:
    loader = in_parts(num_parts, *sizes)
    assert len(loader) == num_parts * len(sizes)
    counted: dict[int, float] = {}
    found = 0
    for part in loader:
        found += 1
        assert loader.latest is not None
        for sample in part["x"].tolist():  # as a mean over the part that Lightning divides by the number of parts
            weight = loader.weight / num_parts / len(part["x"]) * loader.latest.size
            counted[sample] = counted.get(sample, 0.0) + weight
    assert found == len(loader)
    assert counted == pytest.approx(dict.fromkeys(range(sum(sizes)), 1.0))


def test_equal_parts_are_not_weighed() -> None:
    loader = in_parts(4, 8, 12)
    assert {loader.weight for _ in loader} == {1.0}


def test_nobody_knows_the_length_of_a_stream_but_its_last_batch_is_told() -> None:
    loader, told = in_parts(2, 4, 4, length=UNKNOWN_LENGTH), []
    loader.on_last = lambda: told.append(True)
    assert len(loader) == UNKNOWN_LENGTH
    parts = iter(loader)
    for is_told in ([], [], [True], [True]):
        next(parts)
        assert told == is_told


@pytest.mark.parametrize("wrapped", [lambda loss: loss, lambda loss: {"loss": loss, "more": 1}])
def test_the_loss_goes_by_the_weight(wrapped: Any) -> None:
    loader = SimpleNamespace(weight=0.5)
    strategy = SimpleNamespace(training_step=lambda batch: wrapped(torch.tensor(4.0)))
    trainer: Any = SimpleNamespace(train_dataloader=loader, strategy=strategy)
    step = weighing_parts(trainer)
    assert step(None) == wrapped(torch.tensor(2.0))
    loader.weight = 1.0
    assert step(None) == wrapped(torch.tensor(4.0))
    strategy.training_step = lambda batch: None
    assert weighing_parts(trainer)(None) is None


def test_schedulers_count_steps() -> None:
    configs = [SimpleNamespace(interval="step", frequency=3), SimpleNamespace(interval="epoch", frequency=3)]
    SchedulersOfParts().on_train_start(SimpleNamespace(lr_scheduler_configs=configs, accumulate_grad_batches=2), None)
    assert [config.frequency for config in configs] == [6, 3]


@pytest.mark.parametrize(("parts", "ready", "is_within"), [(1, 5, False), (2, 4, False), (2, 5, True), (3, 5, True)])
def test_within_a_step(parts: int, ready: int, is_within: bool) -> None:
    progress = SimpleNamespace(current=SimpleNamespace(ready=ready))
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress))
    trainer: Any = SimpleNamespace(accumulate_grad_batches=parts, fit_loop=loop)
    assert is_within_step(trainer) is is_within
