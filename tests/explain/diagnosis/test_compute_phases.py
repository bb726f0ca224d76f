"""Phases of compute: steps that were not timed, records without them, and what findings say of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kit.evidence_of import evidence
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_rules import run_rules
from wellfed.explain.diagnosis.step_times import OTHER, phase_shares, phases_ms, show_phases

SHARES = {"forward_frac": 0.25, "backward_frac": 0.5, "optimizer_frac": 0.15}


def with_shares(**more: Any) -> Evidence:
    found = evidence(**more)
    assert found.record.time is not None
    found.record.time.update(SHARES)  # type: ignore[typeddict-item]
    return found


def test_shares_add_up_to_compute_and_are_shown() -> None:
    time = with_shares(compute_ms=9.5, host_ms=0.5).record.time
    shares = phase_shares(time)
    assert list(shares) == ["forward", "backward", "optimizer", OTHER]
    assert sum(shares.values()) == pytest.approx(0.95)
    assert show_phases(time) == "forward 25.0 %, backward 50.0 %, optimizer 15.0 %, other compute 5.0 %"


def test_without_figures_nothing_is_shown() -> None:
    assert show_phases(evidence().record.time) == show_phases(None) == ""
    assert phase_shares(evidence().record.time) == {}
    assert evidence().steps.all_phases_ms == {}


def timed(steps: int, timed_steps: list[int], *, on_gpu: bool) -> dict[str, Any]:
    """Columns of steps whose forward pass takes a tenth of the compute time in the first timed step, and more later."""
    table = {
        "compute_ms": np.where(np.arange(steps) % 2, 20.0, 10.0),
        "copy_ms": np.full(steps, 1.0 if on_gpu else np.nan),
    }
    shares = {"forward": np.linspace(0.1, 0.3, len(timed_steps)), "backward": 0.5, "optimizer": 0.1}
    for name, share in shares.items():
        column = np.full(steps, np.nan)
        column[timed_steps] = share * table["compute_ms"][timed_steps]
        table |= {f"{'device_' if on_gpu else ''}{name}_ms": column}
    return table


def test_on_a_gpu_the_steps_between_two_timed_ones_have_the_shares_of_those() -> None:
    table = timed(12, [2, 6, 8], on_gpu=True)
    found = phases_ms(table)
    nan, shares = np.nan, [0.1, 0.125, 0.15, 0.175, 0.2, 0.25, 0.3]
    expected = np.array([nan, nan, *shares, nan, nan, nan])
    assert found["forward"] == pytest.approx(expected * table["compute_ms"], nan_ok=True)
    others = 0.4 - np.array(shares)
    assert found[OTHER][2:9] == pytest.approx(others * table["compute_ms"][2:9])


@pytest.mark.parametrize("known", [[3], [3, 20], [0, 17, 34]])
def test_phases_are_neither_extrapolated_nor_interpolated_over_many_steps(known: list[int]) -> None:
    found = phases_ms(timed(40, known, on_gpu=True))
    assert {name: np.flatnonzero(np.isfinite(ms)).tolist() for name, ms in found.items()} == dict.fromkeys(found, known)
    assert len(found) == 4


def test_on_a_cpu_steps_that_were_not_timed_stay_unknown() -> None:
    found = phases_ms(timed(5, [1, 3], on_gpu=False))
    assert np.flatnonzero(np.isfinite(found["forward"])).tolist() == [1, 3]


def test_times_to_launch_are_never_the_phases_of_a_gpu() -> None:
    """The record may have no figures yet: the table decides which clock counts."""
    launched = {**timed(5, [1, 3], on_gpu=False), "copy_ms": np.ones(5)}
    assert phases_ms(launched) == {}
    assert evidence(steps=5, columns=launched, time=None).steps.all_phases_ms == {}
    assert phases_ms({**launched, "copy_ms": np.full(5, np.nan)}) != {}
    assert phases_ms(timed(5, [], on_gpu=True)) == {}


def test_where_nothing_is_left_to_tune_the_finding_says_where_compute_goes() -> None:
    first = run_rules(with_shares(ceiling=1.0))[0]
    assert first.id == "healthy"
    assert first.message.endswith(f"Shares of a step: {show_phases(with_shares().record.time)}.")
    assert first.evidence["backward_frac"] == 0.5
    assert "backward_frac" not in run_rules(evidence(ceiling=1.0))[0].evidence
