import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.footprints import MIB, estimate
from tests.kit.machines import GIB, H200, LAPTOP, TWO, card, machine
from tests.plan.test_decide import FETCH, MODEL, TABLE, composed, config, faults_of
from wellfed.config.schema import FeatureMode
from wellfed.plan.decide import plan_run
from wellfed.plan.device import plan_device
from wellfed.plan.micro_batch import PLANNED_FRAC
from wellfed.plan.predict.peak import NoEstimate

BLOCKS = dataclasses.replace(MODEL, has_blocks=True)
WHOLE = {"micro_batch": 64, "checkpoint_activations": False}
DEEP = {"per_sample": 100 * MIB}
"""64 samples: 6.4 GiB beside 0.8 GiB of parameters, gradients and state."""


def planned(given_config, gpu, facts=H200, *, data=FETCH, model=BLOCKS, footprints=None, memory="auto", **sizes):
    choices = {"gpu": gpu, "memory": memory}
    device = plan_device(given_config, choices, facts)
    return plan_run(given_config, choices, facts, device, data, model, estimate=footprints or estimate(**sizes))


def test_what_fits_whole_is_not_split_and_the_peak_is_the_reason():
    plan = planned(config(), "24gb", **DEEP)
    assert (plan.memory.micro_batch, plan.memory.accumulate, plan.misfit) == (64, 1, None)
    assert plan.predicted_peak_gib == pytest.approx(0.8 + 6.4, rel=0.2)
    assert f"predicted peak {plan.predicted_peak_gib:.2f} GiB of 19.44" in plan.knobs["memory.micro_batch"].because
    assert plan.parts["activations"] == 6400 * MIB


def test_a_small_card_gets_smaller_micro_batches_and_the_same_step():
    plan = planned(config(), "8gb", **DEEP)
    micro = plan.memory.micro_batch
    assert 40 <= micro < 64
    assert plan.memory.accumulate * micro >= 64 > (plan.memory.accumulate - 1) * micro
    assert plan.memory.checkpoint_activations is False
    assert plan.predicted_peak_gib <= PLANNED_FRAC * 7.2
    assert "the most of 64 samples a device that fit at a time" in plan.knobs["memory.micro_batch"].because


def test_one_sample_that_does_not_fit_is_checkpointed():
    plan = planned(config(), "8gb", per_sample=8 * GIB)
    assert plan.memory.checkpoint_activations is True
    assert plan.memory.micro_batch == 2
    assert "without it one sample at a time needs 8." in plan.knobs["memory.checkpoint_activations"].because
    assert plan.misfit is None


def test_a_table_that_leaves_no_room_moves_to_the_host():
    frozen = {"table": 3 * GIB, "per_sample": 5 * GIB}
    data = dataclasses.replace(TABLE, feature_bytes=3 * GIB)
    plan = planned(config(), "8gb", data=data, model=MODEL, **frozen)
    assert plan.memory.features == "cache_host"
    assert "cache would be faster, and one sample at a time needs 8." in plan.knobs["memory.features"].because


LITTLE_RAM = machine(card(), ram_gib=4.0)


@pytest.mark.parametrize(("facts", "offered"), [(H200, True), (LITTLE_RAM, False)])
def test_host_memory_is_offered_where_it_holds_the_table(facts, offered):
    data = dataclasses.replace(TABLE, feature_bytes=3 * GIB)
    asked = config(memory={**WHOLE, "features": FeatureMode.cache})
    plan = planned(asked, "8gb", facts, data=data, model=MODEL, table=3 * GIB, per_sample=60 * MIB)
    assert [change for change in plan.remedies if change.endswith("=dynamic")]
    assert ("memory.features=cache_host" in plan.remedies) == offered


def test_what_was_asked_for_is_not_changed_and_the_way_out_is_named():
    asked = config(memory={**WHOLE, "features": FeatureMode.cache})
    plan = planned(asked, "8gb", data=TABLE, **DEEP)
    assert (plan.memory.micro_batch, plan.memory.features) == (64, "cache")
    text = str(plan.misfit)
    assert "the budget is 7.20 GiB, of which 6.48 GiB are planned with, and 64 samples at a time need" in text
    assert "activations 6.2" in text
    assert "Set memory.micro_batch=" in text
    assert "or set memory.checkpoint_activations=true" in text
    assert "gpu=16gb" in text


def test_every_remedy_fits_when_it_is_typed():
    plan = planned(config(memory=WHOLE), "8gb", **DEEP)
    size = int(str(plan.misfit).partition("memory.micro_batch=")[2].partition(" ")[0])
    assert planned(config(memory={**WHOLE, "micro_batch": size}), "8gb", **DEEP).misfit is None
    assert planned(config(memory={**WHOLE, "micro_batch": size + 1}), "8gb", **DEEP).misfit is not None
    typed = config(memory={"micro_batch": 64, "checkpoint_activations": True})
    assert planned(typed, "8gb", **DEEP).misfit is None


def test_a_model_that_fits_no_card_says_what_is_left():
    plan = planned(config(), "8gb", parameters=100 * GIB, model=MODEL)
    assert "one sample at a time needs" in str(plan.misfit)
    assert str(plan.misfit).endswith("Take a smaller workload.model.")


def test_ranks_share_a_step():
    given = config(trainer={"devices": 2})
    alone, shared = planned(config(), "auto", **DEEP), planned(given, "auto", TWO, **DEEP)
    assert shared.memory.micro_batch == 32
    assert shared.predicted_peak_gib < alone.predicted_peak_gib
    assert shared.parts["gradient buckets"] > 0


def test_without_an_estimate_nothing_is_refused_and_it_is_said():
    plan = planned(config(), "8gb", footprints=lambda mode, checkpointed: NoEstimate("it asks for values"))
    assert (plan.predicted_peak_gib, plan.misfit) == (None, None)
    assert "The peak memory is not predicted: it asks for values." in plan.warnings


def test_what_is_known_alone_still_refuses_without_an_estimate():
    assert "before any activation" in faults_of(config(), model=dataclasses.replace(MODEL, parameter_bytes=900 * GIB))


def test_on_a_cpu_without_a_card_to_plan_for_the_peak_is_told_and_nothing_is_split():
    plan = planned(config(), "cpu", LAPTOP, **DEEP)
    assert (plan.memory.micro_batch, plan.misfit) == (64, None)
    assert plan.predicted_peak_gib > 7


@given(
    gpu=st.sampled_from(["8gb", "16gb", "24gb", "80gb"]),
    per_sample=st.integers(1, 2000),
    effective=st.integers(1, 300),
    devices=st.sampled_from([1, 2]),
)
def test_a_plan_without_a_misfit_fits_and_keeps_the_step(gpu, per_sample, effective, devices):
    if effective < devices:
        return
    plan = planned(
        config(effective, trainer={"devices": devices}), gpu, TWO, per_sample=per_sample * MIB, parameters=100 * MIB
    )
    share = -(-effective // devices)
    micro, parts = plan.memory.micro_batch, plan.memory.accumulate
    assert 1 <= micro <= share
    assert parts * micro >= share > (parts - 1) * micro
    assert (plan.misfit is None) == (plan.predicted_peak_gib <= PLANNED_FRAC * plan.device.memory_gib + 1e-6)
    assert plan.workload.effective_batch_size == effective


def test_tight_takes_no_more_than_fits():
    for model, checkpointed in ((MODEL, False), (BLOCKS, True)):
        plan = planned(composed("memory=tight"), "8gb", memory="tight", per_sample=2 * GIB, model=model)
        assert plan.misfit is None
        assert plan.memory.micro_batch >= 1
        assert plan.memory.checkpoint_activations is checkpointed


def test_a_larger_card_for_a_budget_that_was_typed_is_a_larger_budget():
    plan = planned(config(gpu={"memory_gib": 0.5}), "8gb", per_sample=8 * GIB, model=MODEL)
    text = str(plan.misfit)
    assert "gpu=8gb" not in text
    assert "the budget is 512.0 MiB, of which 460.8 MiB are planned with" in text
    enough = float(text.partition("gpu.memory_gib=")[2].removesuffix(")."))
    for size, fits in ((enough, True), (enough - 0.02, False)):
        again = planned(config(gpu={"memory_gib": size}), "8gb", per_sample=8 * GIB, model=MODEL)
        assert (again.misfit is None) == fits
