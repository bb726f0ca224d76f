"""The summary of a loop, by its steps, its levels and its loader."""

import json

import numpy as np
import pytest

from wellfed.explain.diagnosis.curves.curve_verdict import utilisation_of
from wellfed.monitor.loop_summary import LoopSummary
from wellfed.observe.timing.readiness import summarise
from wellfed.observe.timing.step_clock import StepRow


def row(step, wait_ms=1.0, compute_ms=9.0, host_ms=0.0, copy_ms=None):
    parts = {"wait_ms": wait_ms, "copy_ms": copy_ms, "compute_ms": compute_ms, "host_ms": host_ms}
    return StepRow(step, step / 100, 0, 1, 1, 1, **parts, asked_wait_ms=wait_ms, warmup=step <= 3)


def seen(*, steps=60, levels=None, unread=(), unknown=(), num_workers=None, cores=8.0, notes=(), **parts):
    rows = [row(step, **parts) for step in range(1, steps + 1)]
    curves = {gpu: utilisation_of(np.arange(60.0), np.full(60, float(pct))) for gpu, pct in (levels or {}).items()}
    return LoopSummary(summarise(rows), frozenset(unknown), curves, unread, num_workers, cores, notes)


def test_rate_and_parts_of_a_step_are_said():
    first, second, *_ = seen().lines()
    assert first == "100 steps/s (95 % interval 100 to 100) over 57 steps after 3 of warm-up"
    assert second == (
        "a step takes 10.00 ms on average (median 10.00, p95 10.00): "
        "waiting for data 10.0 %, compute 90.0 %, between steps 0.0 %"
    )
    assert "copy 50.0 %" in seen(copy_ms=10.0).lines()[1]


@pytest.mark.parametrize(
    ("num_workers", "cores", "said"),
    [
        (None, 8, "batches are built more slowly than they are used"),
        (0, 8, "builds each batch in the training process (num_workers=0). Try num_workers=4."),
        (0, 2, "Try num_workers=1."),
        (0, 0.5, "Try num_workers=1."),
        (2, 8, "workers can't keep up (num_workers=2, on 8 CPU cores)"),
    ],
)
def test_waiting_is_said_with_what_can_be_seen_of_the_loader(num_workers, cores, said):
    advice = seen(num_workers=num_workers, cores=cores, levels={0: 20}).advice()
    assert advice.startswith("10.0 % of the time goes into waiting for data: ")
    assert said in advice


@pytest.mark.parametrize(
    ("parts", "levels", "said"),
    [
        ({"wait_ms": 0.1}, {}, "Steps hardly wait for data."),
        ({"wait_ms": 0.1}, {0: 95}, "Steps hardly wait for data."),
        ({"wait_ms": 0.1}, {0: 20}, "where a GPU idles, it does so within steps"),
        ({"wait_ms": 0.1, "host_ms": 5.0}, {0: 20}, "goes into what lies between steps"),
        ({"unknown": ["wait_frac"], "wait_ms": 0.0}, {}, "The wait for data is unknown here."),
    ],
)
def test_what_else_holds_a_loop_up(parts, levels, said):
    assert said in seen(levels=levels, **parts).advice()


def test_steps_that_are_shorter_than_a_hand_over_get_no_workers():
    short = seen(wait_ms=0.3, compute_ms=0.9, num_workers=0).advice()
    assert "Try num_workers" not in short
    assert "Larger batches" in short
    assert "Try num_workers" in seen(wait_ms=3.3, compute_ms=0.9, num_workers=0).advice()
    fed = seen(wait_ms=2.4, compute_ms=1.0, num_workers=1).advice()
    assert "Try" not in fed
    assert "else use num_workers=0" in fed


def test_all_of_it_is_plain_data_and_what_was_not_timed_is_none():
    entry = seen(levels={0: 20}, num_workers=0, unknown=["copy_frac"], copy_ms=0.0).entry()
    assert json.loads(json.dumps(entry)) == {**entry, "ci95": list(entry["ci95"])}
    assert (entry["steps"], entry["steps_per_s"], entry["wait_frac"]) == (57, pytest.approx(100), pytest.approx(0.1))
    assert entry["copy_frac"] is None
    assert entry["gpus"]["0"]["verdict"] == "starved"
    unknown = seen(unknown=["wait_frac"]).entry()
    assert (unknown["wait_frac"], unknown["readiness_frac"]) == (None, None)
