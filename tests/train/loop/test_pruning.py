"""Pruning after each validation."""

import pytest

from tests.kit import loop, tiny
from wellfed.train.loop.pruning import Pruning


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

    pruning = Pruning(pruner, lambda: 0.5, total_steps=20)
    assert train(pruning) == (2 * last, "others are better")
    assert told == [(number, 0.5) for number in range(1, last + 1)]


def test_nothing_is_ended_that_is_over() -> None:
    told: list[int] = []

    def pruner(number: int, value: float) -> str | None:
        told.append(number)
        return "others are better" if number == 10 else None

    pruning = Pruning(pruner, lambda: 0.5, total_steps=20)
    assert train(pruning) == (20, "trainer.max_steps=20")
    assert told == list(range(1, 11))


def test_without_a_judge_or_a_figure_it_goes_on() -> None:
    assert train(Pruning(None, lambda: 0.5))[0] == 20
    assert train(Pruning(lambda number, value: "ended", lambda: None))[0] == 20
