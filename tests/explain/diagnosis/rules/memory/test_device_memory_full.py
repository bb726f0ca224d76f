"""What ran out of device memory is told, with what would have been enough."""

import pytest

from tests.kit.card_evidence import on_card
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.rules.memory_rules import device_memory_full
from wellfed.explain.diagnosis.run_rules import run_rules
from wellfed.record.entries import RunRecord

DOWN = [
    {"kind": "oom", "step": 5, "message": "CUDA out of memory"},
    {"kind": "step_down", "step": 5, "micro_batch": 64, "before": 128},
    {"kind": "oom", "step": 9, "message": "CUDA out of memory"},
    {"kind": "step_down", "step": 9, "micro_batch": 32, "before": 64},
]


def test_a_run_that_went_on_in_smaller_parts():
    found = device_memory_full(on_card(events=DOWN, used_frac=0.99))
    assert found is not None
    assert found.change == ("memory.micro_batch=32", "memory.accumulate=null")
    assert found.message.startswith("Device memory ran out 2 times, first in step 5 (19.80 GiB of a budget of 20.00")


def test_the_last_of_each_change_counts():
    events = [
        *DOWN,
        {"kind": "ladder", "step": 10, "change": "memory.features=cache_host"},
        {"kind": "ladder", "step": 11, "change": "memory.features=dynamic"},
        {"kind": "ladder", "step": 12, "change": "workload.optimizer.foreach=false"},
        {"kind": "step_down", "step": 20, "evaluation_batch": 512, "before": 1024},
    ]
    found = device_memory_full(on_card(events=events))
    assert found is not None
    assert found.change[2:] == (
        "memory.features=dynamic",
        "++workload.optimizer.foreach=false",
        "workload.eval_batch_size=512",
    )


def test_a_run_that_was_restarted():
    changes = {"memory.micro_batch": 8, "memory.accumulate": 2, "workload.optimizer.foreach": False}
    restart = {"kind": "restart", "step": 3, "checkpoint": "last.ckpt", "because": "no room", "changes": changes}
    found = device_memory_full(on_card(events=[{"kind": "oom", "step": 5, "message": "no room"}, restart]))
    assert found is not None
    assert found.change == ("memory.micro_batch=8", "memory.accumulate=null", "++workload.optimizer.foreach=false")
    assert "ran out 1 time, first in step 5" in found.message
    assert "The run continued from its last checkpoint in smaller parts" in found.message


@pytest.mark.parametrize(
    ("plan", "change"),
    [
        ({"memory.micro_batch": 64}, ("memory.micro_batch=32", "memory.accumulate=null")),
        (
            {"memory.micro_batch": 64, "memory.on_oom": "fail"},
            ("memory.micro_batch=32", "memory.accumulate=null", "memory.on_oom=retry"),
        ),
        ({"memory.micro_batch": 1}, ("memory.checkpoint_activations=true",)),
        (
            {"memory.micro_batch": 1, "memory.checkpoint_activations": True, "memory.features": "cache"},
            ("memory.features=dynamic",),
        ),
        ({"memory.micro_batch": 1, "memory.checkpoint_activations": True}, ()),
        ({}, ("memory.checkpoint_activations=true",)),
    ],
)
def test_a_run_that_ended_there(plan, change):
    of_run = {knob: {"value": value, "because": "", "source": "set"} for knob, value in plan.items()}
    first, *_ = run_rules(Evidence(RunRecord("run", status="oom", plan=of_run)))
    assert (first.id, first.change, first.severity) == ("device_memory_full", change, "high")


@pytest.mark.parametrize(
    ("may_lower", "micro", "change"),
    [
        (["memory.micro_batch"], 1, ("memory.features=dynamic",)),
        (["memory.checkpoint_activations"], 64, ("memory.checkpoint_activations=true",)),
        ([], 64, ("memory.features=dynamic",)),
    ],
)
def test_what_the_model_would_refuse_is_not_advised(may_lower, micro, change):
    values = {"memory.micro_batch": micro, "memory.features": "cache", "memory.on_oom": "fail"}
    of_run = {knob: {"value": value, "because": "", "source": "predicted"} for knob, value in values.items()}
    memory = {"device": "a card", "measured_peak_gib": 1.0, "may_lower": may_lower}
    found = device_memory_full(Evidence(RunRecord("run", status="oom", plan=of_run, memory=memory)))
    assert found is not None
    assert found.change == change


def test_a_retry_is_advised_to_those_who_switched_it_off():
    values = {"memory.micro_batch": 64, "memory.on_oom": "fail"}
    for source, more in (("set", ("memory.on_oom=retry",)), ("predicted", ())):
        of_run = {knob: {"value": value, "because": "", "source": source} for knob, value in values.items()}
        found = device_memory_full(Evidence(RunRecord("run", status="oom", plan=of_run)))
        assert found is not None
        assert found.change == ("memory.micro_batch=32", "memory.accumulate=null", *more)


def test_silent():
    assert device_memory_full(on_card(used_frac=0.98)) is None


def test_host_memory_is_the_matter_of_another_rule():
    for kind, is_found in (("device_oom", True), ("host_oom", False)):
        evidence = Evidence(RunRecord("run", status="oom", error={"kind": kind, "message": "", "advice": ""}))
        assert (device_memory_full(evidence) is not None) is is_found
