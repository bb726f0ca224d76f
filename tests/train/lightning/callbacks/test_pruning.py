"""Pruning after each validation, with the real Trainer."""

from pathlib import Path

import pytest

from tests.kit import tiny
from wellfed.train.lightning import trainer as lit
from wellfed.train.lightning.callbacks.pruning import Pruning

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")


def train(folder: Path, pruning: Pruning, **changes: int) -> int:
    """Trains up to 20 steps with a validation every 2 steps; returns the number of steps."""
    trainer = lit.make_trainer(tiny.options(validate_every_steps=2, **changes), [pruning], folder)
    lit.fit(trainer, tiny.module(), tiny.loader(), tiny.eval_loader(), None)
    return int(trainer.global_step)


@pytest.mark.parametrize("last", [1, 3, 4])
def test_the_judge_ends_it_after_a_validation(tmp_path: Path, last: int) -> None:
    told: list[tuple[int, float]] = []

    def pruner(number: int, value: float) -> str | None:
        told.append((number, value))
        return "others are better" if number == last else None

    pruning = Pruning(pruner, lambda: 0.5, total_steps=20)
    assert train(tmp_path, pruning) == 2 * last
    assert told == [(number, 0.5) for number in range(1, last + 1)]
    assert pruning.reason == "others are better"


def test_nothing_is_ended_that_is_over(tmp_path: Path) -> None:
    told: list[int] = []

    def pruner(number: int, value: float) -> str | None:
        told.append(number)
        return "others are better" if number == 10 else None

    pruning = Pruning(pruner, lambda: 0.5, total_steps=20)
    assert train(tmp_path, pruning) == 20
    assert told == list(range(1, 11))
    assert pruning.reason is None


def test_without_a_judge_or_a_figure_it_goes_on(tmp_path: Path) -> None:
    assert train(tmp_path / "a", Pruning(None, lambda: 0.5)) == 20
    assert train(tmp_path / "b", Pruning(lambda number, value: "ended", lambda: None)) == 20
