"""Products in full float32 on a card that has tensor cores."""

import pytest

from tests.kit.card_evidence import on_card
from wellfed.explain.diagnosis.rules.compute_rules import tensor_cores_idle

FLOAT32 = {"gpu.precision": "32-true", "gpu.tf32": False}
IDLE = {"tensor_active_pct": 0}


@pytest.mark.parametrize(
    ("capability", "change"),
    [("9.0", ("gpu.precision=bf16-mixed", "gpu.tf32=true")), ("7.5", ("gpu.precision=16-mixed",))],
)
def test_what_the_card_can(capability, change):
    found = tensor_cores_idle(on_card(card=IDLE, plan=FLOAT32, capability=capability))
    assert found is not None
    assert found.change == change
    assert not found.changes_learning
    assert "0.0 % of its tensor cores" in found.message


@pytest.mark.parametrize("gpus", [{}, {"0": {}}])
@pytest.mark.parametrize("other", [{"capability": "5.2"}, {"capability": "7.5", "name": "NVIDIA GeForce GTX 1650"}])
def test_a_card_that_the_run_left_alone_is_not_asked(gpus, other):
    cards = [{"index": 0, "memory_gib": 24.0, "capability": "9.0"}, {"index": 1, "memory_gib": 4.0} | other]
    run = {"card": IDLE, "plan": FLOAT32 | {"trainer.devices": 1}, "machine": {"gpus": cards}}
    found = tensor_cores_idle(on_card(**run, gpus=gpus))
    assert found is not None
    assert found.evidence["capability"] == 9.0
    assert tensor_cores_idle(on_card(**run, gpus={"0": {}, "1": {}})) is None


def test_what_the_host_launches_and_memory_moves_bounds_the_gain():
    found = tensor_cores_idle(on_card(card=IDLE | {"dram_active_pct": 10}, plan=FLOAT32, launch_frac=0.5))
    assert found is not None
    assert found.gain is not None
    assert found.gain.high == pytest.approx(2, rel=0.01)


def test_cards_that_tell_nothing_of_their_tensor_cores():
    figures = {"tensor_active_pct": None, "sm_active_pct": None, "dram_active_pct": None}
    found = tensor_cores_idle(on_card(card=figures, plan=FLOAT32, capability="8.6"))
    assert found is not None
    assert "its tensor cores are not used" in found.message


@pytest.mark.parametrize(
    "figures",
    [
        {"card": IDLE},
        {"plan": FLOAT32},
        {"card": IDLE, "plan": FLOAT32 | {"gpu.tf32": True}},  # no products in it
        {"card": IDLE, "plan": FLOAT32, "capability": "6.1"},
        {"card": IDLE | {"sm_active_pct": 30}, "plan": FLOAT32},
        {"card": IDLE, "plan": FLOAT32, "machine": {}},
        {"card": IDLE, "plan": FLOAT32, "machine": {"gpus": [{"name": "GTX 1660", "capability": "7.5"}]}},
    ],
)
def test_silent(figures):
    assert tensor_cores_idle(on_card(**figures)) is None
