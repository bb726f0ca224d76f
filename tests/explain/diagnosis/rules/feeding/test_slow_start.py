"""First steps that take long."""

import numpy as np

from tests.kit.evidence_of import evidence
from wellfed.explain.diagnosis.rules.feeding_rules import slow_start as check


def started(first_ms, *, steps=200, warmup=3, **more):
    compute_ms = np.where(np.arange(steps) < warmup, first_ms, 10.0)
    run = evidence(steps=steps, columns={"compute_ms": compute_ms}, **more)
    run.record.throughput["warmup_steps"] = warmup
    return run


def test_they_are_noted():
    found = check(started(3000.0))
    assert found.is_note
    assert "The warm-up of 3 steps took 9.0 s of 11.0 s of training" in found.message
    assert "torch.compile" in check(started(3000.0, plan={"gpu.compile": "default"})).message


def test_a_later_step_that_compiles_counts():
    is_warmup = np.isin(np.arange(200), (0, 1, 2, 99))
    columns = {"compute_ms": np.where(np.arange(200) == 99, 60_000.0, 10.0), "warmup": is_warmup.astype(float)}
    found = check(evidence(steps=200, columns=columns, plan={"gpu.compile": "default"}))
    assert "The warm-up of 4 steps took 1 min 00 s of 1 min 02 s of training: torch.compile" in found.message


def test_a_short_start_and_a_long_run_are_not():
    assert check(started(300.0)) is None
    assert check(started(3000.0, steps=20_000)) is None
