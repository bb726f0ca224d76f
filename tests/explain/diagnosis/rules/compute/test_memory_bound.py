"""Steps that move bytes rather than compute."""

import pytest

from tests.kit.card_evidence import on_card
from wellfed.explain.diagnosis.rules.compute_rules import memory_bound

MOVES = {"dram_active_pct": 78, "tensor_active_pct": 2}


def test_fewer_bytes():
    found = memory_bound(on_card(card=MOVES, plan={"gpu.precision": "32-true"}))
    assert found is not None
    assert found.change == ("gpu.precision=bf16-mixed", "gpu.compile=default")
    assert found.message.startswith("Reading and writing the card's memory takes 78.9 % of its bandwidth")
    assert found.gain is not None
    assert 1 < found.gain.factor < found.gain.high < 2


def test_nothing_left_to_set():
    found = memory_bound(on_card(card=MOVES, plan={"gpu.compile": "default"}))
    assert found is not None
    assert (found.change, found.gain, found.severity) == ((), None, "low")


@pytest.mark.parametrize("card", [{}, {"dram_active_pct": None}, MOVES | {"tensor_active_pct": 40}])
def test_silent(card):
    assert memory_bound(on_card(card=card)) is None


def test_a_model_that_can_not_be_compiled_is_not_advised_to():
    found = memory_bound(on_card(card=MOVES, refused=["gpu.compile"]))
    assert found is not None
    assert found.change == ()
