"""Sections of a plan: plain values with a reason beside each."""

import pytest

from tests.plan.test_decide import config, planned
from wellfed.plan.run_plan import Decided, TrainerSection

DECIDED = {
    "accelerator": Decided("cpu", "no GPU", "predicted"),
    "devices": Decided(1, "trainer.devices=1", "set"),
    "strategy": Decided("auto", "one device", "predicted"),
}


def test_a_section_has_plain_values_and_the_reason_of_each():
    section = TrainerSection.of(DECIDED)
    assert (section.accelerator, section.devices, section.strategy) == ("cpu", 1, "auto")
    assert {knob: section.decided(knob) for knob in DECIDED} == DECIDED
    assert (section.reasons["devices"].because, section.reasons["devices"].source) == ("trainer.devices=1", "set")


def test_what_is_decided_anew_brings_its_reason():
    section = TrainerSection.of(DECIDED)
    changed = section.but(devices=Decided(2, "two", "measured"))
    assert changed.decided("devices") == Decided(2, "two", "measured")
    assert changed.decided("accelerator") == DECIDED["accelerator"]
    assert section.devices == 1


def test_no_knob_is_forgotten():
    with pytest.raises(TypeError, match="strategy"):
        TrainerSection.of({knob: DECIDED[knob] for knob in ("accelerator", "devices")})


def test_a_plan_as_plain_data_names_each_knob_once_and_what_out_of_memory_does_last():
    plan = planned(config())
    assert plan.to_dict()["loader.num_workers"] == {
        "value": plan.loader.num_workers,
        "because": plan.loader.reasons["num_workers"].because,
        "source": "predicted",
    }
    first, *_, last = plan.to_dict()
    assert (first, last) == ("trainer.accelerator", "memory.on_oom")
    assert len(plan.to_dict()) == 21


def test_a_configuration_is_filled_in_with_what_was_decided():
    plan, left_open = planned(config()), {"seed": 1, "loader": {"num_workers": None, "skip_ids": [3]}}
    filled = plan.filled_in(left_open)
    assert filled["loader"]["num_workers"] == plan.loader.num_workers
    assert (filled["seed"], filled["loader"]["skip_ids"]) == (1, [3])
    assert left_open["loader"]["num_workers"] is None
