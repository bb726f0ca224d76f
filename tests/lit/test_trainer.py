from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lit import tiny
from wellfed.lit import trainer as lit
from wellfed.lit.trainer import Schedule, total_steps

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")


@given(
    name=st.sampled_from(["constant", "cosine"]),
    warmup=st.integers(0, 50),
    floor=st.floats(0, 1),
    total=st.one_of(st.none(), st.integers(1, 500)),
    step=st.integers(0, 600),
)
def test_the_schedule_stays_between_its_bounds(name, warmup, floor, total, step) -> None:
    schedule = Schedule(name, warmup, floor, total)
    factor = schedule(step)
    assert 0 < factor <= 1 if step < warmup else floor - 1e-9 <= factor <= 1
    if step + 1 < warmup:
        assert schedule(step + 1) > factor
    if step >= warmup:
        assert schedule(step + 1) <= factor + 1e-12


def test_cosine_ends_at_its_floor_and_warm_up_rises_to_one() -> None:
    schedule = Schedule("cosine", 4, 0.1, 104)
    assert [schedule(step) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert schedule(54) == pytest.approx(0.55)
    assert schedule(104) == schedule(1000) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("epochs", "steps", "expected"), [(3, None, 30), (3, 25, 25), (3, 99, 30), (None, 7, 7), (None, None, None)]
)
def test_the_first_limit_counts(epochs: int | None, steps: int | None, expected: int | None) -> None:
    assert total_steps(tiny.options(max_epochs=epochs, max_steps=steps), 10) == expected


def test_weights_come_back_from_a_checkpoint(tmp_path: Path) -> None:
    trained = tiny.module()
    tiny.fit(trained, tmp_path, [tiny.checkpoints(tmp_path)], max_steps=3)
    fresh = tiny.module()
    assert not (tiny.weights(fresh) == tiny.weights(trained)).all()
    lit.load_weights(fresh, tmp_path / "last.ckpt")
    assert (tiny.weights(fresh) == tiny.weights(trained)).all()
