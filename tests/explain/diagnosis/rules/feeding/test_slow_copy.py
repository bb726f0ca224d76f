"""Copies that a step stands still for are named, with what hides them."""

from dataclasses import replace

import numpy as np
import pytest

from tests.kit.card_evidence import on_card
from tests.kit.evidence_of import evidence
from tests.kit.loader_evidence import fed_by
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.rules.feeding_rules import slow_copy
from wellfed.explain.diagnosis.run_rules import run_rules

PAGEABLE = {"loader.pin_memory": False, "loader.device_prefetch": 0}


def test_a_copy_from_pageable_memory():
    found = slow_copy(on_card(copy_ms=4.0, compute_ms=5.9, plan=PAGEABLE, loading={"batch_mib": 10.0}))
    assert found is not None
    assert found.message == (
        "40.0 % of each step is copying its batch to the GPU: 10.0 MiB in 4.00 ms, 2.6 GB/s; its memory is not "
        "page-locked and nothing is copied ahead."
    )
    assert found.change == ("loader.pin_memory=true", "loader.device_prefetch=2")
    assert found.gain is not None
    assert found.gain.factor == pytest.approx(1 / 0.6)


def test_a_copy_of_few_bytes_is_held_up_by_something_else():
    """Pinned memory would not make it faster."""
    few = on_card(copy_ms=3.3, compute_ms=20.0, plan=PAGEABLE, loading={"batch_mib": 1.1 / 1024})
    found = slow_copy(few)
    assert found is not None
    assert (found.change, found.gain) == ((), None)
    assert "something else holds it up" in found.message
    assert found.time_lost_frac == pytest.approx(few.copy_frac)


@pytest.mark.parametrize(
    ("plan", "more", "change"),
    [
        (
            {"loader.num_workers": 0, "loader.backend": "torch"},
            {"loading": {"has_fetch": True}},
            ("loader.pin_memory=true",),
        ),
        ({"loader.num_workers": 0}, {}, ("loader.pin_memory=true",)),
        ({"loader.num_workers": 0, "loader.pin_memory": True}, {}, ()),
        ({}, {"refused": ["loader.device_prefetch"]}, ("loader.pin_memory=true",)),
    ],
)
def test_what_the_plan_would_not_copy_ahead_is_not_advised_and_has_no_gain(plan, more, change):
    found = slow_copy(on_card(copy_ms=4.0, plan=PAGEABLE | plan, **more))
    assert found is not None
    assert (found.change, found.gain) == (change, None)
    assert "ahead already" not in found.message


def test_nothing_to_set_where_copies_run_ahead():
    found = slow_copy(on_card(copy_ms=4.0, compute_ms=6.0))
    assert found is not None
    assert found.change == ()
    assert "uint8" in found.advice
    assert found.severity == "high"


def copied_ahead(workers: int, **loader: object) -> Evidence:
    """Steps of 30 ms beside copies of 45 ms, which are made ahead: each waits for 15 ms."""
    build_ms, wait_ms = (60.0, np.full(200, 15.0)) if workers else (2.0, np.full(200, 17.0))
    given = {"device_prefetch": 2, "pin_memory": True, **loader}
    loading = {"batch_mib": 45.0, "has_fetch": True}
    run = fed_by(workers, build_ms=build_ms, step_ms=30.0, wait_ms=wait_ms, loader=given, loading=loading, on_gpu=True)
    return replace(run, all_steps={**run.all_steps, "copy_ahead_ms": np.full(200, 45.0)})


@pytest.mark.parametrize("workers", [0, 4])
def test_steps_that_copies_ahead_of_them_hold_up(workers: int):
    """Neither threads nor more workers copy faster."""
    found, *others = run_rules(copied_ahead(workers))
    assert (found.id, found.change, found.gain) == ("slow_copy", (), None)
    assert found.message.startswith(f"{'33.3' if workers else '36.1'} % of each step waits for its batch to be copied")
    assert "which takes as long as the step: 45.0 MiB in 45.00 ms, 1 GB/s, and copies run ahead" in found.message
    assert found.lost_frac == pytest.approx(0.333 if workers else 0.361, abs=1e-3)
    assert (
        "Many small tensors in a batch, or the model's transfer_batch_to_device, may also cause this" in found.message
    )
    assert [one.id for one in others if not one.is_note] == []


def test_a_loader_that_no_knob_changes_can_have_page_locked_memory_of_its_own():
    given = copied_ahead(4, pin_memory=False, backend="own")
    assert slow_copy(given).change == ("loader.pin_memory=true",)
    found = slow_copy(replace(given, record=replace(given.record, refused=["loader.num_workers"])))
    assert found is not None
    assert found.change == ()
    assert "pin_memory=True" in found.advice


def test_silent():
    assert slow_copy(evidence()) is None
    assert slow_copy(on_card(copy_ms=0.3, plan=PAGEABLE)) is None
