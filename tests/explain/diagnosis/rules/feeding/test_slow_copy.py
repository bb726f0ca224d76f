"""Copies that a step stands still for are named, with what hides them."""

import pytest

from tests.kit.card_evidence import on_card
from tests.kit.evidence_of import evidence
from wellfed.explain.diagnosis.rules.feeding_rules import slow_copy

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


def test_a_copy_longer_than_its_step_is_not_hidden_wholly():
    found = slow_copy(on_card(copy_ms=8.0, compute_ms=2.0, plan={"loader.device_prefetch": 0}))
    assert found is not None
    assert found.change == ("loader.device_prefetch=2",)
    assert found.gain is not None
    assert found.gain.factor == pytest.approx(1 / 0.8, rel=0.02)


def test_a_step_is_no_shorter_than_the_host_takes_to_launch_it():
    found = slow_copy(on_card(copy_ms=4.0, compute_ms=5.9, launch_frac=1.36, plan=PAGEABLE))
    assert found is not None
    assert found.gain is not None
    assert found.gain.factor == pytest.approx(10 / 8, rel=0.02)


def test_a_loader_that_is_left_as_it_came_pins_as_it_likes():
    found = slow_copy(on_card(copy_ms=4.0, plan=PAGEABLE | {"loader.backend": "own"}))
    assert found is not None
    assert found.change == ("loader.device_prefetch=2",)


@pytest.mark.parametrize(
    ("plan", "more", "change"),
    [
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


def test_a_fetch_is_called_ahead_without_workers():
    found = slow_copy(on_card(copy_ms=4.0, plan=PAGEABLE | {"loader.num_workers": 0}, loading={"has_fetch": True}))
    assert found is not None
    assert found.change == ("loader.pin_memory=true", "loader.device_prefetch=2")


def test_nothing_to_set_where_copies_run_ahead():
    found = slow_copy(on_card(copy_ms=4.0, compute_ms=6.0))
    assert found is not None
    assert found.change == ()
    assert "uint8" in found.message
    assert found.severity == "high"


def test_silent():
    assert slow_copy(evidence()) is None
    assert slow_copy(on_card(copy_ms=0.3, plan=PAGEABLE)) is None
