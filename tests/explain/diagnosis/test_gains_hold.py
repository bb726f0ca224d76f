"""Promised gains of the loader against simulated runs with the advised loader, of which the diagnosis knows nothing."""

import pytest

from tests.kit.few import few
from tests.kit.made_loader import Kind, evidence_of_made, log_normal, one_in, true_step_ms
from wellfed.explain.diagnosis.rules.feeding_rules import cause_of_waiting
from wellfed.explain.diagnosis.run_rules import run_rules

STEP_MS, SEEDS = 10.0, 4
KINDS = {
    "far store": Kind(cpu_ms=2, wait_ms=38),
    "lock": Kind(cpu_ms=2, wait_ms=6, locked_ms=20),
    "whole lock": Kind(locked_ms=25, cpu_ms=1),
    "rate limit": Kind(cpu_ms=2, wait_ms=8, every_ms=18),
    "rate limit with a burst": Kind(cpu_ms=2, wait_ms=8, every_ms=18, burst=8),
    "heavy tail": Kind(cpu_ms=2, wait_ms=38, tail=log_normal(1.2)),
    "one in eight": Kind(cpu_ms=2, wait_ms=30, tail=one_in(8, 12)),
    "heavy tail of CPU": Kind(cpu_ms=30, wait_ms=2, tail=log_normal(1.0)),
    "one in eight of CPU": Kind(cpu_ms=30, wait_ms=2, tail=one_in(8, 12)),
    "CPU": Kind(cpu_ms=40, wait_ms=1),
    "CPU and a lock": Kind(cpu_ms=25, locked_ms=12),
    "half CPU, half a lock": Kind(cpu_ms=15, locked_ms=13),
}
NOISE = 0.02
"""Runs of some hundred steps are known no better."""


def promised(kind: Kind, workers: int, seed: int) -> tuple[float, float, float] | None:
    """Both ends of the gain that the first finding promises, and the true one; None where it advises no change."""
    first = run_rules(evidence_of_made(kind, workers, step_ms=STEP_MS, seed=seed))[0]
    if first.gain is None or not first.change:
        return None
    typed = dict(one.split("=") for one in first.change)
    advised = int(typed.get("loader.num_workers", workers))
    prefetch = int(typed.get("loader.prefetch_factor", 2))
    before = true_step_ms(kind, workers, step_ms=STEP_MS, seed=seed)
    after = true_step_ms(kind, advised, step_ms=STEP_MS, prefetch=prefetch, seed=seed)
    return first.gain.low, first.gain.high, before / after


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("kind", few(KINDS, 4))
def test_the_true_gain_is_within_the_promised_interval(kind: str, workers: int) -> None:
    found = [promised(KINDS[kind], workers, seed) for seed in range(SEEDS)]
    promises = [one for one in found if one is not None]
    held = sum((1 - NOISE) * low <= true <= (1 + NOISE) * high for low, high, true in promises)
    assert held >= len(promises) - 1  # a 95 % interval


@pytest.mark.parametrize("kind", ["far store", "lock", "whole lock", "rate limit", "rate limit with a burst"])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_that_mostly_wait_are_promised_nothing_for_sure(kind: str, workers: int) -> None:
    found = promised(KINDS[kind], workers, seed=0)
    assert found is None or found[0] == 1.0


def test_a_promise_is_no_emptier_than_it_must_be() -> None:
    low, high, true = promised(KINDS["CPU"], 1, seed=0)
    assert low > 0.75 * true
    assert high < 1.1 * true


@pytest.mark.parametrize("kind", ["lock", "whole lock", "rate limit"])
def test_workers_that_made_batches_slower_are_not_advised(kind: str) -> None:
    run = evidence_of_made(KINDS[kind], 3, step_ms=STEP_MS)
    assert cause_of_waiting(run) == "contended_loading"
    first = run_rules(run)[0]
    assert first.id == "contended_loading"
    assert (first.change, first.gain) == ((), None)
    assert "More workers don't help" in first.message


@pytest.mark.parametrize("kind", ["far store", "CPU", "heavy tail of CPU"])
def test_batches_that_take_as_long_alone_are_no_contention(kind: str) -> None:
    for seed in range(SEEDS):
        assert cause_of_waiting(evidence_of_made(KINDS[kind], 2, step_ms=STEP_MS, seed=seed)) != ("contended_loading")
