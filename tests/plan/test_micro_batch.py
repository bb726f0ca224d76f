import dataclasses

import pytest

from tests.kit.footprints import footprint
from tests.kit.machines import GIB, LAPTOP
from tests.plan.test_budget import DEEP, planned
from tests.plan.test_decide import config
from wellfed.plan.micro_batch import (
    MOST_PROBES,
    PLANNED_FRAC,
    needs_probe,
    with_probes,
)
from wellfed.plan.predict.peak import StepShape, predicted_peak

STEP = StepShape(samples=64)
CARD = footprint(**DEEP)
"""As the plan was made with: 100 MiB a sample."""


class Truth:
    """A card on which a step takes ``times`` what was predicted, and ``more`` bytes; beyond ``memory`` it runs out."""

    def __init__(self, times=1.0, more=0, memory=None):
        self.times, self.more, self.memory, self.tried = times, more, memory, []

    def needs(self, micro, step):
        return int(self.times * predicted_peak(CARD, micro, step).tensor_bytes) + self.more

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


def test_a_prediction_is_measured_on_a_card_alone():
    assert needs_probe(planned(config(), "8gb", **DEEP))
    assert not needs_probe(planned(config(), "8gb", facts=LAPTOP, **DEEP)), "trains on the CPU"
