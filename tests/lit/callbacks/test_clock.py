from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import pytest
from torch import Tensor

from tests.lit import tiny
from wellfed.lit.callbacks.clock import WARMUP_STEPS, BareBatches, Clock, TimedLoader
from wellfed.sample_rng import SampleRng
from wellfed.timing.readiness import summarise
from wellfed.timing.step_clock import StepClock, StepRow

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")
PAUSE_S = 0.02


class SlowData(tiny.TinyData):
    def fetch(self, indices: Tensor, rng: SampleRng) -> dict[str, Tensor]:
        time.sleep(PAUSE_S)
        return super().fetch(indices, rng)


class SlowModel(tiny.TinyModel):
    def loss(self, batch: Any) -> Any:
        time.sleep(PAUSE_S)
        return super().loss(batch)


class SlowCallback(pl.Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(PAUSE_S)


def timed(tmp_path: Path, data: Any = None, model: Any = None, callbacks: Any = (), **changes: Any) -> list[StepRow]:
    rows: list[StepRow] = []
    clock = StepClock()
    loader = TimedLoader(tiny.loader(data=data), clock)
    tiny.fit(
        tiny.module(model=model, micro=16), tmp_path, [Clock(clock, rows.extend), *callbacks], batches=loader, **changes
    )
    return rows


def test_every_step_is_a_row_and_an_epoch_is_ragged(tmp_path: Path) -> None:
    rows = timed(tmp_path, max_steps=7)
    assert [row.step for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert [row.samples for row in rows] == [32, 32, 6, 32, 32, 6, 32]
    assert [row.num_micro for row in rows] == [2, 2, 1, 2, 2, 1, 2]
    assert [row.epoch for row in rows] == [0, 0, 0, 1, 1, 1, 2]
    assert [row.warmup for row in rows] == [True] * WARMUP_STEPS + [False] * 4
    assert all(row.copy_ms is None for row in rows)


@pytest.mark.parametrize("where", ["wait_ms", "compute_ms", "host_ms"])
def test_a_planted_delay_is_found_where_it_is(tmp_path: Path, where: str) -> None:
    planted = {
        "wait_ms": {"data": SlowData()},
        "compute_ms": {"model": SlowModel()},
        "host_ms": {"callbacks": [SlowCallback()]},
    }[where]
    rows = [row for row in timed(tmp_path, **planted, max_steps=12) if not row.warmup]
    # Medians: a neighbour on the machine may hit any single step.
    medians = {name: median(getattr(row, name) for row in rows) for name in ("wait_ms", "compute_ms", "host_ms")}
    assert max(medians, key=lambda name: medians[name]) == where
    assert medians[where] > 0.6 * sum(medians.values())
    summary = summarise(rows)
    assert summary is not None
    assert summary.wait_frac + summary.compute_frac + summary.host_frac == pytest.approx(1, abs=0.01)
    if where == "wait_ms":
        assert summary.readiness_frac == 0


def test_a_users_own_module_gets_bare_batches() -> None:
    clock = StepClock()
    first = next(iter(TimedLoader(tiny.loader(), clock, unwrap=True)))
    assert set(first) == {"x", "y"}
    assert [len(batch["x"]) for batch in BareBatches(tiny.eval_loader())] == [32, 32, 6]
    assert len(BareBatches(tiny.eval_loader())) == 3
