"""Phases of compute: steps that were not timed, records without them, and what findings say of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kit.evidence_of import evidence
from wellfed.explain.diagnosis.compute_phases import OTHER, phase_shares, phases_ms, show_phases
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.rules.compute import step_time_trend
from wellfed.explain.diagnosis.run_rules import run_rules

SHARES = {"forward_frac": 0.25, "backward_frac": 0.5, "optimizer_frac": 0.15}


def with_shares(**more: Any) -> Evidence:
    found = evidence(**more)
    assert found.record.time is not None
    found.record.time.update(SHARES)  # type: ignore[typeddict-item]
    return found


def test_shares_add_up_to_compute_and_are_shown() -> None:
    time = with_shares(compute_ms=9.5, host_ms=0.5).time
    shares = phase_shares(time)
    assert list(shares) == ["forward", "backward", "optimizer", OTHER]
    assert sum(shares.values()) == pytest.approx(0.95)
    assert show_phases(time) == "forward 25.0 %, backward 50.0 %, optimizer 15.0 %, other compute 5.0 %"


def test_without_figures_nothing_is_shown() -> None:
    assert show_phases(evidence().time) == show_phases(None) == ""
    assert phase_shares(evidence().time) == {}
    assert evidence().all_phases_ms == {}


@pytest.mark.parametrize("on_gpu", [False, True])
def test_steps_that_were_not_timed_have_the_shares_of_those_around_them(on_gpu: bool) -> None:
    nan, clock = np.nan, "device_" if on_gpu else ""
    table = {
        "compute_ms": np.array([10.0, 20.0, 10.0, 10.0]),
        f"{clock}forward_ms": np.array([2.0, nan, 4.0, nan]),
        f"{clock}backward_ms": np.array([5.0, nan, 5.0, nan]),
        f"{clock}optimizer_ms": np.array([1.0, nan, 1.0, nan]),
    }
    found = phases_ms(table, on_gpu=on_gpu)
    assert found["forward"] == pytest.approx([2, 6, 4, 4])
    assert sum(found.values()) == pytest.approx(table["compute_ms"])
    assert phases_ms(table, on_gpu=not on_gpu) == {}
    table[f"{clock}forward_ms"][:] = nan
    assert phases_ms(table, on_gpu=on_gpu) == {}


def test_where_nothing_is_left_to_tune_the_finding_says_where_compute_goes() -> None:
    first = run_rules(with_shares(ceiling=1.0))[0]
    assert first.id == "healthy"
    assert first.message.endswith(f"Of a step: {show_phases(with_shares().time)}.")
    assert first.evidence["backward_frac"] == 0.5
    assert "backward_frac" not in run_rules(evidence(ceiling=1.0))[0].evidence


def test_the_optimizer_of_many_small_tensors_is_named() -> None:
    process = {"torch_threads": 8, "parameter_tensors": 2000, "parameter_values": 2_000_000, "busy_threads": []}
    (found,) = [one for one in run_rules(with_shares(process=process)) if one.id == "many_tensors"]
    assert "optimizer 15.0 %" in found.message
    assert found.evidence["optimizer_frac"] == 0.15


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ("forward", "in the forward pass"),
        ("backward", "in the backward pass"),
        ("optimizer", "in the optimizer's step"),
    ],
)
def test_growth_is_named_by_its_phase(phase: str, words: str) -> None:
    columns = {f"{name}_ms": np.full(120, 3.0) for name in ("forward", "backward", "optimizer")}
    columns[f"{phase}_ms"] = 3.0 + np.linspace(0, 20, 120)
    columns["compute_ms"] = np.sum(list(columns.values()), axis=0) + 0.5
    found = step_time_trend.check(evidence(steps=120, compute_ms=float(columns["compute_ms"].mean()), columns=columns))
    assert found is not None
    assert f"The growth is {words}" in found.message
    assert found.evidence["grows_in"] == phase
