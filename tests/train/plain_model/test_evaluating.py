"""Batches of an evaluation are halved if memory runs out, and no sample counts twice."""

from typing import Any

import pytest
import torch

from tests.kit import loop, tiny
from wellfed.errors import OutOfMemoryExhausted


class Mae:
    """An evaluation that fails after some calls, before or after it has added to its sums."""

    best_metric, best_mode = "mae", "min"

    def __init__(self, above: int = 1000, add_first: bool = False) -> None:
        self._above, self._add_first = above, add_first
        self.reset()

    def reset(self) -> None:
        self.total, self.count, self.sizes = torch.zeros(1), 0, []

    def update(self, model: Any, batch: Any, *features: Any) -> None:
        error = (model(batch) - batch["y"]).abs().sum()
        self.count += len(batch["y"])
        if self._add_first:
            self.total += error.to(self.total.device)
        if len(batch["y"]) > self._above:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        if not self._add_first:
            self.total = self.total + error.to(self.total.device)
        self.sizes.append(len(batch["y"]))

    def compute(self) -> dict[str, float]:
        return {"mae": float(self.total[0]) / self.count}

    def artifacts(self, folder: Any) -> dict[str, Any]:
        return {}


def validated(evaluation: Any, batch_size: int = 32, **more: Any) -> tuple[float, list[Any]]:
    events: list[Any] = []
    placed = loop.model(evaluation=evaluation, on_event=lambda kind, **facts: events.append((kind, facts)), **more)
    return loop.validated(placed, tiny.eval_loader(batch_size))["mae"], events


@pytest.mark.parametrize("add_first", [False, True])
def test_the_pass_begins_again_in_halves_and_counts_each_sample_once(add_first: bool) -> None:
    evaluation = Mae(above=9, add_first=add_first)
    found, events = validated(evaluation)
    assert found == pytest.approx(validated(Mae())[0], rel=1e-6)
    assert evaluation.count == tiny.NUM_SAMPLES
    assert evaluation.sizes == [8] * 8 + [6]
    assert [kind for kind, _ in events] == ["oom", "step_down"] * 2  # later batches begin with that size
    assert events[1][1] == {"step": 0, "evaluation_batch": 16, "before": 32}


def test_one_sample_that_does_not_fit() -> None:
    with pytest.raises(OutOfMemoryExhausted, match="in the val split with 1 sample at a time"):
        validated(Mae(above=0))


def test_training_goes_on_as_if_nothing_had_happened() -> None:
    weights = []
    for above in (1000, 5):
        placed = loop.model(evaluation=Mae(above=above), dropout=0.3)
        loop.fit(placed, validation=tiny.eval_loader(), max_steps=8, validate_every_steps=2)
        weights.append(loop.weights(placed))
    assert torch.equal(*weights)
