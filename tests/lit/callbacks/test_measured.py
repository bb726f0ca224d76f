"""A training that is only timed ends once its rate is known, by summaries made up here."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.lit import tiny
from wellfed.lit.callbacks.measured import StopWhenMeasured
from wellfed.timing.readiness import StepSummary

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")


def summary(steps: int, half_frac: float | None = 0.01, rate: float = 100.0) -> StepSummary:
    ci95 = None if half_frac is None else (rate * (1 - half_frac), rate * (1 + half_frac))
    return StepSummary(steps, 3, rate, ci95, 1.0, 0.0, None, 1.0, 0.0, 1.0, 1.0)


def stopped_at(at: Callable[[int], StepSummary | None], *, ranks: int = 1, limit: int = 2000) -> tuple[int, list[int]]:
    """The step that it ends at (0 = never), and the steps at which it looked; ``at`` gets the step."""
    step, looks = 0, []

    def look() -> StepSummary | None:
        looks.append(step)
        return at(step)

    callback = StopWhenMeasured(look, within=0.02)
    for step in range(1, limit + 1):
        trainer: Any = SimpleNamespace(world_size=ranks, global_step=step, should_stop=False)
        callback.on_train_batch_end(trainer, None, None, None, step)
        if trainer.should_stop:
            return step, looks
    return 0, looks


def test_it_ends_where_the_rate_is_known_but_not_before_40_steps() -> None:
    assert stopped_at(summary)[0] == pytest.approx(40, abs=1)


def test_the_warm_up_does_not_count() -> None:
    end, _ = stopped_at(lambda step: None if step <= 30 else summary(step - 30))
    assert 70 <= end <= 75


def test_it_goes_on_until_the_interval_is_narrow() -> None:
    end, _ = stopped_at(lambda step: summary(step, half_frac=0.05 if step < 400 else 0.015))
    assert 400 <= end <= 500


@pytest.mark.parametrize(("half_frac", "ends"), [(0.0199, True), (0.0201, False), (None, False)])
def test_known_means_within_2_percent(half_frac: float | None, ends: bool) -> None:
    assert bool(stopped_at(lambda step: summary(step, half_frac))[0]) is ends


def test_no_rate_is_never_known() -> None:
    assert stopped_at(lambda step: summary(step, 0.0, rate=0.0))[0] == 0
    assert stopped_at(lambda step: None)[0] == 0


def test_several_ranks_run_all_the_steps_and_none_looks() -> None:
    assert stopped_at(summary, ranks=2) == (0, [])


def test_it_looks_the_more_rarely_the_further_on() -> None:
    """Each look reads all steps, and its time counts as the steps' own."""
    _, looks = stopped_at(lambda step: summary(step, half_frac=0.5), limit=20_000)
    assert len(looks) < 40
    gaps = [later - earlier for earlier, later in pairwise(looks[1:])]
    assert gaps == sorted(gaps)


def test_a_training_ends_there(tmp_path: Path) -> None:
    trainer = tiny.fit(tiny.module(), tmp_path, [StopWhenMeasured(lambda: summary(40), 0.02)])
    assert trainer.global_step == 1
