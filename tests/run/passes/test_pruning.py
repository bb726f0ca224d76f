"""Pruning after each validation."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kit import loop, tiny
from wellfed.run.passes.base import Pruner, RunPasses

Pruning = Callable[[int], "str | None"]


def pruning_by(pruner: Pruner | None, value: float | None = 0.5) -> Pruning:
    journal = SimpleNamespace(validations_written=lambda: 0)
    passes: Any = SimpleNamespace(_books=SimpleNamespace(journal=journal), _latest_best_metric=lambda: value)
    passes._total_steps = 20
    return RunPasses._pruning(passes, pruner)


def train(pruning: Pruning) -> tuple[int, str | None]:
    """Trains up to 20 steps with a validation every 2 steps; returns the number of steps, and what ended it."""
    trained = loop.fit(loop.model(), validation=tiny.eval_loader(), validate_every_steps=2, prune=pruning)
    return trained.number, trained.ended_by


@pytest.mark.parametrize("last", [1, 3, 4])
def test_the_judge_ends_it_after_a_validation(last: int) -> None:
    told: list[tuple[int, float]] = []

    def pruner(number: int, value: float) -> str | None:
        told.append((number, value))
        return "others are better" if number == last else None

    assert train(pruning_by(pruner)) == (2 * last, "others are better")
    assert told == [(number, 0.5) for number in range(1, last + 1)]


def test_nothing_is_ended_that_is_over() -> None:
    told: list[int] = []

    def pruner(number: int, value: float) -> str | None:
        told.append(number)
        return "others are better" if number == 10 else None

    assert train(pruning_by(pruner)) == (20, "trainer.max_steps=20")
    assert told == list(range(1, 11))


def test_without_a_judge_or_a_figure_it_goes_on() -> None:
    assert train(pruning_by(None))[0] == 20
    assert train(pruning_by(lambda number, value: "ended", None))[0] == 20
