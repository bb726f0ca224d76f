"""Lines that make the host wait for the card are named, with how often."""

import pytest

from tests.kit.card_evidence import on_card
from wellfed.explain.diagnosis.rules.compute_rules import synchronisation

LINES = [{"place": "model.py:7", "per_step": 1.0}, {"place": "model.py:9", "per_step": 12.0}]
HALF = {"launch_frac": 1.0, "card": {"util_pct": 50, "sm_active_pct": 50}}


def test_the_lines_are_named():
    found = synchronisation(on_card(**HALF, synchronisations=LINES))
    assert found is not None
    assert "waits for it at model.py:9 (12 times a step), model.py:7 (once a step), and" in found.message
    assert found.change == ()
    assert found.gain is not None
    assert found.gain.factor == pytest.approx(2, rel=0.05)
    assert found.evidence["synchronisations_per_step"] == 13


def test_many_lines_are_counted():
    lines = [{"place": f"model.py:{line}", "per_step": 0.5} for line in range(5)]
    found = synchronisation(on_card(**HALF, synchronisations=lines))
    assert found is not None
    assert "model.py:2 (every 2 steps) and 2 lines more" in found.message


@pytest.mark.parametrize(
    "figures",
    [
        {"synchronisations": LINES},
        {**HALF, "synchronisations": None},
        {**HALF, "synchronisations": [{"place": "model.py:7", "per_step": 0.02}]},
        {**HALF, "launch_frac": 0.5, "synchronisations": LINES},
    ],
)
def test_silent(figures):
    assert synchronisation(on_card(**figures)) is None
