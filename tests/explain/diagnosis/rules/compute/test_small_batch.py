"""Micro-batches too small for the card are merged; a whole step only grows by advice."""

import pytest

from tests.kit.card_evidence import on_card
from tests.kit.evidence_of import evidence
from wellfed.explain.diagnosis.rules.compute_rules import small_batch

EMPTY = {"util_pct": 96, "sm_active_pct": 20}


def test_micro_batches_are_merged():
    found = small_batch(on_card(num_micro=16, used_frac=0.1, card=EMPTY))
    assert found is not None
    assert found.change == ("memory.micro_batch=64", "memory.accumulate=null")
    assert not found.changes_learning
    assert found.gain is not None
    assert found.gain.factor == pytest.approx(4.45, rel=0.01)  # until the card is full
    assert (
        "16 micro-batches of 8, too small for the GPU: 20.2 % of it is at work. 10.0 % of its memory" in found.message
    )


def test_passes_that_read_weights_for_few_samples():
    card = {"sm_active_pct": 66, "tensor_active_pct": 3.2, "dram_active_pct": 72}
    found = small_batch(on_card(num_micro=32, used_frac=0.01, card=card))
    assert found is not None
    assert found.gain is not None
    assert found.gain.factor == pytest.approx(15.5, rel=0.02)  # 16.3 in a run on the simulated card
    assert "72.8 % of its memory's bandwidth goes into reading weights for few samples" in found.message


@pytest.mark.parametrize(
    "figures",
    [
        {},
        {"num_micro": 8},  # the card is full
        {"card": EMPTY, "used_frac": 0.7},
        {"card": EMPTY, "events": [{"kind": "oom", "step": 1}]},
        {"card": EMPTY, "launch_frac": 1.0},  # launch_bound: cheaper than learning from other steps
    ],
)
def test_silent(figures):
    assert small_batch(on_card(**figures)) is None
    assert small_batch(evidence()) is None
