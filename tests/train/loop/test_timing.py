import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kit import loop, tiny
from wellfed.observe.timing.readiness import StepSummary, summarise
from wellfed.observe.timing.step_clock import WARMUP_STEPS, StepClock, StepRow
from wellfed.run.passes.base import IsMeasured
from wellfed.sample_rng import SampleRng
from wellfed.train.loop.training import Watchers


class MadeClock:
    """A clock that tests advance, so that a busy machine changes no figure."""

    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> float:
        self.s += 1e-4
        return self.s

    def pause(self) -> None:
        self.s += 0.06


class SlowData(tiny.TinyData):
    def __init__(self, clock: MadeClock) -> None:
        super().__init__()
        self.clock = clock

    def fetch(self, indices: Tensor, rng: SampleRng) -> dict[str, Tensor]:
        self.clock.pause()
        return super().fetch(indices, rng)


class SlowModel(tiny.TinyModel):
    """A model that pauses in its forward or backward pass."""

    def __init__(self, clock: MadeClock, *, in_backward: bool = False) -> None:
        super().__init__()
        self.clock, self.in_backward = clock, in_backward

    def loss(self, batch: Any) -> Any:
        found = super().loss(batch)
        if self.in_backward:
            found.loss.register_hook(lambda gradient: self.clock.pause())
        else:
            self.clock.pause()
        return found


def slow_optimizer(clock: MadeClock) -> Any:
    class SlowOptimizer(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            found = super().step(closure)
            clock.pause()
            return found

    return SlowOptimizer


def timed(
    data: Any = None,
    model: Any = None,
    callbacks: Any = None,
    now_s: Callable[[], float] = time.monotonic,
    of_model: Any = None,
    **changes: Any,
) -> list[StepRow]:
    rows: list[StepRow] = []
    placed, watchers = loop.model(**{"model": model, "micro": 16, **(of_model or {})}), Watchers(take_rows=rows.extend)
    more = {"clock": StepClock(now_s=now_s), "watchers": watchers, "callbacks": callbacks}
    loop.fit(placed, tiny.loader(data=data), **more, **changes)
    return rows


def test_every_step_is_a_row_and_an_epoch_is_ragged() -> None:
    rows = timed(max_steps=7)
    assert [row.step for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert [row.samples for row in rows] == [32, 32, 6, 32, 32, 6, 32]
    assert [row.num_micro for row in rows] == [2, 2, 1, 2, 2, 1, 2]
    assert [row.epoch for row in rows] == [0, 0, 0, 1, 1, 1, 2]
    assert [row.warmup for row in rows] == [True] * WARMUP_STEPS + [False] * 4
    assert all(row.copy_ms is None for row in rows)
    assert all(0 < (row.build_ms or 0) < 1e3 for row in rows)


@pytest.mark.parametrize("where", ["wait_ms", "compute_ms", "host_ms"])
def test_a_planted_delay_is_found_where_it_is(where: str) -> None:
    clock = MadeClock()
    planted = {
        "wait_ms": {"data": SlowData(clock)},
        "compute_ms": {"model": SlowModel(clock)},
        "host_ms": {"callbacks": {"slow": loop.After(lambda step: clock.pause())}},
    }[where]
    rows = [row for row in timed(now_s=clock, **planted, max_steps=12) if not row.warmup]
    later = [row for row, before in zip(rows[1:], rows, strict=False) if row.epoch == before.epoch]
    assert len(later) == 6  # a gap between epochs belongs to no step
    for row in later:
        times_ms = {name: getattr(row, name) for name in ("wait_ms", "compute_ms", "host_ms")}
        assert times_ms[where] >= 60
        assert sum(times_ms.values()) - times_ms[where] < 3
    summary = summarise(rows)
    assert summary is not None
    assert sum(summary.time[f"{part}_frac"] for part in ("wait", "compute", "host")) == pytest.approx(1, abs=0.01)
    if where == "wait_ms":
        assert summary.readiness_frac == 0


@pytest.mark.parametrize("where", ["forward_ms", "backward_ms", "optimizer_ms"])
def test_a_planted_delay_is_found_in_its_phase(where: str) -> None:
    clock = MadeClock()
    planted: dict[str, Any] = {
        "forward_ms": {"model": SlowModel(clock)},
        "backward_ms": {"model": SlowModel(clock, in_backward=True)},
        "optimizer_ms": {"of_model": {"optimizer": slow_optimizer(clock)}},
    }[where]
    rows = timed(now_s=clock, **planted, max_steps=8)
    for row in rows:
        times_ms = {name: getattr(row, name) for name in ("forward_ms", "backward_ms", "optimizer_ms")}
        times_ms["other"] = row.compute_ms - sum(times_ms.values())
        pauses = row.num_micro if where in ("forward_ms", "backward_ms") else 1
        assert 60 * pauses <= times_ms.pop(where) < 60 * pauses + 3
        assert all(0 <= took < 3 for took in times_ms.values())
        assert row.device_forward_ms is None
    summary = summarise(rows)
    assert summary is not None
    time: Any = summary.time
    assert time[where.replace("_ms", "_frac")] > 0.9
    assert time[where] > 60


def test_a_step_that_was_repeated_counts_what_its_attempts_took() -> None:
    clock = MadeClock()

    def fail(size: int, call: int) -> BaseException | None:
        clock.pause()
        return torch.OutOfMemoryError("CUDA out of memory.") if size > 16 else None

    first, *rows = timed(now_s=clock, of_model={"micro": 32, "fail": fail, "on_oom": "retry"}, max_steps=5)
    assert (first.num_micro, first.warmup) == (2, True)
    assert first.forward_ms is not None
    assert 180 <= first.forward_ms <= first.compute_ms  # the failed one, and two that are half as large
    assert all(row.forward_ms is not None and row.forward_ms < 60 * row.num_micro + 3 for row in rows)


def test_the_size_of_the_first_batch_is_told_once() -> None:
    told: list[dict[str, int]] = []
    loop.fit(loop.model(), watchers=Watchers(on_first_batch=told.append), max_steps=5)  # type: ignore[arg-type]
    batch = next(iter(tiny.loader())).batch
    assert told == [{"float32": batch["x"].nbytes + batch["y"].nbytes}]


def summary(steps: int, half_frac: float | None = 0.01, rate: float = 100.0) -> StepSummary:
    ci95 = None if half_frac is None else (rate * (1 - half_frac), rate * (1 + half_frac))
    return StepSummary(steps, 3, rate, ci95, 1.0, {}, {})


def stopped_at(at: Callable[[int], StepSummary | None], *, limit: int = 2000) -> tuple[int, list[int]]:
    """Returns the step at which it ends (0 = never), and the steps at which it checked."""
    step, looks = 0, []

    def look() -> StepSummary | None:
        looks.append(step)
        return at(step)

    is_measured = IsMeasured(look, within=0.02)
    for step in range(1, limit + 1):
        if is_measured(step):
            return step, looks
    return 0, looks


def test_it_ends_where_the_rate_is_known_but_not_before_40_steps() -> None:
    assert stopped_at(summary)[0] == pytest.approx(40, abs=1)


@pytest.mark.parametrize(("half_frac", "ends"), [(0.0199, True), (0.0201, False), (None, False)])
def test_known_means_within_2_percent(half_frac: float | None, ends: bool) -> None:
    assert bool(stopped_at(lambda step: summary(step, half_frac))[0]) is ends


def test_it_looks_the_more_rarely_the_further_on() -> None:
    """Each check reads all steps, and its time counts as time of the steps."""
    _, looks = stopped_at(lambda step: summary(step, half_frac=0.5), limit=20_000)
    assert len(looks) < 40
    gaps = [later - earlier for earlier, later in pairwise(looks[1:])]
    assert gaps == sorted(gaps)
