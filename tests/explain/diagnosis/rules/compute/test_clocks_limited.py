"""Clocks that power or heat hold down are told, and nothing is advised."""

import numpy as np

from tests.kit.card_evidence import on_card
from wellfed.explain.diagnosis.rules.compute_rules import clocks_limited
from wellfed.explain.diagnosis.run_rules import run_rules


def test_the_cause_and_the_clocks():
    card = {
        "heat_limited": np.array([0.0] * 6 + [1.0] * 24),
        "power_limited": 0.0,
        "sm_clock_mhz": np.array([1980.0] * 6 + [990.0] * 24),
    }
    found = run_rules(on_card(card=card))
    assert [finding.id for finding in found] == ["healthy", "clocks_limited"]
    assert found[1].change == ()
    assert found[1].message.startswith(
        "The clocks of GPU 0 were held down by heat in 80.0 % of the readings, at 1188 MHz on average (at most 1980"
    )


def test_silent():
    assert clocks_limited(on_card()) is None
    assert clocks_limited(on_card(card={"power_limited": 0.0, "heat_limited": 0.0})) is None


def test_a_run_on_the_cpu_is_not_held_down_by_the_clocks_of_a_gpu():
    assert clocks_limited(on_card(card={"heat_limited": 1.0})) is not None
    assert clocks_limited(on_card(card={"heat_limited": 1.0}, copy_ms=None)) is None
