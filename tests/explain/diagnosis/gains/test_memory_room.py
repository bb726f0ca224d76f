"""A micro-batch grows as far as memory surely holds it, and the step stays the same."""

from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.card_evidence import on_card
from tests.kit.evidence_of import evidence
from wellfed.explain.diagnosis.gains.device_load import has_run_out, memory_frac, merge


def test_micro_batches_are_merged_as_far_as_the_budget_goes():
    merged = merge(on_card(num_micro=8, used_frac=0.2))
    assert merged is not None
    assert merged.change == ("memory.micro_batch=64", "memory.accumulate=null")
    assert merged.parts_before == 4 * merged.parts
    everything = merge(on_card(num_micro=8, used_frac=0.01))
    assert everything is not None
    assert everything.change[0] == "memory.micro_batch=128"


def test_the_smaller_last_batch_of_an_epoch_is_not_the_usual_one():
    last = {"micro_batch": np.r_[np.full(99, 16.0), 4.0], "num_micro": np.r_[np.full(99, 8.0), 1.0]}
    merged = merge(on_card(num_micro=8, used_frac=0.01, columns=last))
    assert merged is not None
    assert (merged.micro_batch_before, merged.micro_batch) == (16, 128)


@pytest.mark.parametrize(
    "figures",
    [
        {"num_micro": 1},
        {"num_micro": 8, "used_frac": 0.6},
        {"num_micro": 8, "events": [{"kind": "step_down", "step": 3, "micro_batch": 16, "before": 32}]},
        {"num_micro": 8, "events": [{"kind": "step_down", "step": 3}]},
        {"num_micro": 8, "plan": {"workload.effective_batch_size": None}},
    ],
)
def test_nothing_to_merge(figures):
    assert merge(on_card(**figures)) is None


@given(parts=st.sampled_from([2, 3, 4, 5, 8, 16, 64]), used=st.floats(0.001, 1))
def test_a_merged_step_holds_no_more_than_the_budget(parts, used):
    merged = merge(on_card(num_micro=parts, used_frac=used))
    if merged is None:
        return
    before = 128 // parts
    assert before < merged.micro_batch <= 128
    assert merged.parts == ceil(128 / merged.micro_batch)
    assert used * merged.micro_batch / before <= 0.9 + 1e-9


def test_a_cpu_has_no_budget():
    assert memory_frac(evidence(memory={"measured_peak_gib": 1.0, "budget_gib": 2.0})) is None
    assert merge(evidence()) is None
    assert not has_run_out(evidence())
