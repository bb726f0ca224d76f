"""Phases of compute: steps that were not timed, records without them, and what findings say of them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kit.evidence_of import evidence
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.step_times import OTHER, phase_shares

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


def test_without_figures_nothing_is_shown() -> None:
    assert phase_shares(evidence().record.time) == {}
