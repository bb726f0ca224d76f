import dataclasses

import pytest

from tests.kit.footprints import footprint
from tests.kit.machines import GIB, LAPTOP
from tests.plan.test_budget import DEEP, planned
from tests.plan.test_decide import MODEL, config
from wellfed.plan.memory_candidates import PLANNED_FRAC
from wellfed.plan.micro_batch import (
    MOST_PROBES,
    as_remembered,
    at_plateau,
    steps_to_run,
    why_untried,
    with_probes,
)
from wellfed.plan.predict.peak import StepShape, predicted_peak
from wellfed.train.memory.remembered_sizes import FOREACH, MICRO_BATCH, Lowered

STEP = StepShape(samples=64)
CARD = footprint(**DEEP)
"""As the plan was made with: 100 MiB a sample."""


class Truth:
    """A card on which a step takes ``times`` what was predicted, and ``more`` bytes; beyond ``memory`` it runs out."""

    def __init__(self, times=1.0, more=0, memory=None):
        self.times, self.more, self.memory, self.tried = times, more, memory, []

    def needs(self, micro, step):
        return int(self.times * predicted_peak(CARD, micro, step).reserved_bytes) + self.more

    def __call__(self, micro):
        self.tried.append(micro)
        needed = self.needs(micro, StepShape(micro))
        return None if self.memory and needed > self.memory else needed


def probed(truth, room=None, gpu="8gb"):
    plan = planned(config(), gpu, **DEEP)
    return plan, with_probes(plan, truth, lambda: room, STEP, CARD)


def test_what_was_predicted_stays_and_is_measured():
    truth = Truth()
    plan, found = probed(truth)
    assert truth.tried == [plan.memory.micro_batch] == [found.memory.micro_batch]
    entry = found.knobs["memory.micro_batch"]
    assert entry.source == "measured"
    assert entry.because.startswith(plan.knobs["memory.micro_batch"].because)
    took = f"a step of {entry.value} alone took "
    assert took in entry.because
    assert " where " in entry.because.partition(took)[2]
    assert dataclasses.replace(found, memory=plan.memory) == plan


def test_less_than_predicted_raises_nothing():
    plan, found = probed(Truth(times=0.5))
    assert found.memory.micro_batch == plan.memory.micro_batch


@pytest.mark.parametrize(
    "truth", [Truth(1.3), Truth(2.0), Truth(1.0, 2 * GIB), Truth(1.2, GIB), Truth(1.3, 0, 7 * GIB)]
)
def test_what_takes_more_goes_down_until_a_measured_step_fits(truth):
    plan, found = probed(truth)
    micro = found.memory.micro_batch
    assert plan.memory.micro_batch > micro == truth.tried[-1]
    assert truth.needs(micro, STEP) <= 1.02 * PLANNED_FRAC * 7.2 * GIB  # the rest of a step is as predicted
    assert micro > 3
    assert found.memory.accumulate == -(-64 // micro)
    assert {found.knobs[f"memory.{knob}"].source for knob in ("micro_batch", "accumulate")} == {"measured"}
    assert found.predicted_peak_gib < plan.predicted_peak_gib
    assert found.knobs["memory.micro_batch"].because.startswith(f"{plan.memory.micro_batch} were planned; ")
    assert found.warnings == plan.warnings


def test_running_out_is_told_and_halved():
    truth = Truth(1.0, 0, 3 * GIB)
    plan, found = probed(truth)
    first = plan.memory.micro_batch
    assert truth.tried[:2] == [first, first // 2]
    assert f"{first} at a time ran out of memory" in found.knobs["memory.micro_batch"].because


def test_a_card_with_less_than_the_budget_beside_the_context_counts_as_it_is():
    truth = Truth()
    plan, found = probed(truth, room=int(5.5 * GIB))
    assert truth.needs(found.memory.micro_batch, STEP) <= PLANNED_FRAC * 5.5 * GIB
    assert found.memory.micro_batch < plan.memory.micro_batch
    assert "beside CUDA's context the card has 5.5 GiB" in found.knobs["memory.micro_batch"].because
    assert probed(Truth(), room=100 * GIB)[1] == probed(Truth())[1]


def test_what_never_fits_ends_with_a_warning():
    truth = Truth(1.0, 50 * GIB, 20 * GIB)
    _, found = probed(truth)
    assert len(truth.tried) <= MOST_PROBES
    assert found.memory.micro_batch >= 1
    assert "Memory may run out at memory.micro_batch=" in found.warnings[-1]


# -- when real steps are run -------------------------------------------------------------------------------------------


def on_devices(plan, devices=1, compile="none"):
    trainer = dataclasses.replace(plan.trainer, devices=devices)
    return dataclasses.replace(plan, trainer=trainer, device=dataclasses.replace(plan.device, compile=compile))


def test_a_prediction_is_measured_on_a_card_alone():
    assert steps_to_run(planned(config(), "8gb", **DEEP), None, MODEL).memory
    assert not steps_to_run(planned(config(), "8gb", facts=LAPTOP, **DEEP), None, MODEL), "trains on the CPU"


@pytest.mark.parametrize("typed", [{"micro_batch": 3}, {"accumulate": 32}])
def test_what_was_typed_is_not_measured(typed):
    plan = planned(config(memory=typed), "8gb", **DEEP)
    assert not steps_to_run(plan, 0.8, MODEL)


def test_a_size_that_is_remembered_is_not_measured_again():
    plan = planned(config(), "8gb", **DEEP)
    assert not steps_to_run(as_remembered(plan, ran_out(2, 64), STEP, CARD), 0.8, MODEL)


def test_a_plateau_is_looked_for_on_a_cpu_too_and_not_for_a_model_that_is_never_split():
    plan = planned(config(memory={"plateau_frac": 0.8}), "cpu")
    assert steps_to_run(plan, 0.8, MODEL).plateau
    assert not steps_to_run(plan, 0.8, dataclasses.replace(MODEL, has_batch_norm=True))


def test_the_plan_says_why_no_step_is_run():
    plan = planned(config(), "8gb", **DEEP)
    assert why_untried(plan, MODEL) == ""
    assert "runs its own step" in why_untried(plan, dataclasses.replace(MODEL, is_lightning_module=True))
    assert "each rank would measure for itself" in why_untried(on_devices(plan, 2), MODEL)
    compiled = why_untried(on_devices(plan, compile="default"), MODEL)
    assert compiled.startswith("gpu.compile=default would compile twice")
    assert compiled.endswith("what it keeps for its graphs is not predicted")


# -- the plateau -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frac", "rates", "micro"),
    [
        (0.8, {64: 100.0, 32: 98.0, 16: 90.0, 8: 60.0}, 16),
        (0.5, {64: 100.0, 32: 98.0, 16: 90.0, 8: 60.0, 4: 30.0}, 8),
        (1.0, {64: 100.0, 32: 98.0}, 64),
        (0.8, {64: 0.0, 32: 98.0, 16: 60.0}, 32),  # a whole step ran out of memory
        (0.8, {64: 100.0, 32: 90.0, 16: None}, 32),  # time is up
    ],
)
def test_the_smallest_micro_batch_that_keeps_the_rate_is_taken(frac, rates, micro):
    plan = planned(config(memory={"plateau_frac": frac}), "cpu")
    tried = []
    found = at_plateau(plan, frac, lambda size: tried.append(size) or rates[size], STEP, None)
    assert tried == list(rates)
    assert (found.memory.micro_batch, found.memory.accumulate) == (micro, 64 // micro)
    entry = found.knobs["memory.micro_batch"]
    assert entry.source == "measured"
    assert f"keeps {frac:g} of the best rate" in entry.because


def test_rates_are_measured_down_to_a_single_sample_and_no_further():
    plan, tried = planned(config(memory={"plateau_frac": 0.8}), "cpu"), []
    assert at_plateau(plan, 0.8, lambda size: tried.append(size) or 1.0, StepShape(5), None).memory.micro_batch == 1
    assert tried == [5, 2, 1]


def test_without_any_rate_the_plan_stays():
    plan = planned(config(memory={"plateau_frac": 0.8}), "cpu")
    assert at_plateau(plan, 0.8, lambda size: None, STEP, None) == plan
    assert at_plateau(plan, 0.8, lambda size: 0.0, STEP, None) == plan


def test_no_rate_is_measured_of_what_is_predicted_not_to_fit():
    plan = planned(config(memory={"plateau_frac": 0.8}), "8gb", **DEEP)
    tried, step = [], StepShape(samples=640)
    found = at_plateau(plan, 0.8, lambda size: tried.append(size) or 1.0, step, CARD)
    assert predicted_peak(CARD, tried[0], step).reserved_bytes <= plan.device.memory_gib * GIB
    assert found.parts == predicted_peak(CARD, 1, step).parts


# -- what earlier runs had to lower ------------------------------------------------------------------------------------


def ran_out(value, before, run="NAME"):
    return {MICRO_BATCH: Lowered(value, before, "2026-11-22", run)}


def recalled(remembered, given=None, gpu="24gb", step=STEP):
    plan = planned(given or config(), gpu, **DEEP)
    return plan, as_remembered(plan, remembered, step, CARD)


def test_a_size_that_ran_out_is_not_tried_again_and_the_reason_says_when_it_was():
    plan, found = recalled(ran_out(4, 64))
    assert (plan.memory.micro_batch, found.memory.micro_batch, found.memory.accumulate) == (64, 4, 16)
    entry = found.knobs["memory.micro_batch"]
    assert entry.because == (
        "64 was predicted to fit, and ran out of memory on 2026-11-22 (run NAME); memory.remember=false tries it again"
    )
    assert entry.source == found.knobs["memory.accumulate"].source == "measured"
    assert found.predicted_peak_gib < plan.predicted_peak_gib
    assert found.parts == predicted_peak(CARD, 4, STEP).parts


def test_of_several_steps_down_the_last_is_told():
    _, found = recalled(ran_out(4, 8))
    assert found.knobs["memory.micro_batch"].because.startswith("64 was predicted to fit, and 8 ran out of memory on ")


def test_without_an_estimate_it_was_planned():
    plan = dataclasses.replace(planned(config(), "24gb", **DEEP), predicted_peak_gib=None)
    found = as_remembered(plan, ran_out(4, 64), STEP, None)
    assert found.knobs["memory.micro_batch"].because.startswith("64 was planned, and ran out of memory on ")
    assert (found.memory.accumulate, found.predicted_peak_gib) == (16, None)


@pytest.mark.parametrize("remembered", [{}, ran_out(64, 65), ran_out(100, 128)])
def test_what_is_planned_smaller_stays(remembered):
    plan, found = recalled(remembered)
    assert found == dataclasses.replace(plan, remembered=remembered)
    assert found.knobs == plan.knobs


@pytest.mark.parametrize("typed", [{"micro_batch": 32}, {"accumulate": 2}])
def test_a_typed_micro_batch_wins(typed):
    plan, found = recalled(ran_out(4, 64), config(memory=typed))
    assert found.memory == plan.memory
    assert found.memory.micro_batch == 32


def test_a_step_on_all_weights_at_once_that_ran_out_is_a_number_of_the_plan():
    one_by_one = {FOREACH: Lowered(False, None, "2026-11-22", "NAME")}
    plan, found = recalled(one_by_one)
    assert found.memory == plan.memory
    entry = found.knobs[FOREACH]
    assert (entry.value, entry.source) == (False, "measured")
    assert entry.because.startswith("its step on all weights at once ran out of memory on 2026-11-22 (run NAME); ")
    optimizer = {"_target_": "torch.optim.AdamW", "lr": 1e-3}
    filled = found.filled_in({"workload": {"name": "a", "optimizer": optimizer}})
    assert filled["workload"]["optimizer"] == {**optimizer, "foreach": False}
    assert "foreach" not in optimizer
    assert FOREACH not in plan.knobs


def test_no_rate_is_measured_of_a_size_that_ran_out():
    plan = planned(config(memory={"plateau_frac": 0.8}), "24gb", **DEEP)
    rates, tried = {20: 100.0, 10: 60.0}, []
    plan = as_remembered(plan, ran_out(20, 40), STEP, CARD)
    assert plan.knobs["memory.micro_batch"].source == "predicted"  # a quarter of the step is below it
    found = at_plateau(plan, 0.8, lambda size: tried.append(size) or rates[size], STEP, CARD)
    assert tried == [20, 10]
    assert found.memory.micro_batch == 20
    because = found.knobs["memory.micro_batch"].because
    assert "; 40 ran out of memory on 2026-11-22 (run NAME), and no more than 20 was tried: memory.remember=" in because
