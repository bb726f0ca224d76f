"""Findings: how much they matter, what they say, what run.json holds of them."""

import pytest

from wellfed.explain.diagnosis.finding import Finding, Gain


def test_a_finding_says_its_overrides_and_what_they_are_expected_to_win():
    finding = Finding("few", "61 % waits.", {"wait_frac": 0.61}, ("loader.num_workers=4",), gain=Gain(2.1, 1.5, 2.5))
    assert finding.text == ("61 % waits. Try: loader.num_workers=4, about 2.1 times as fast (1.50 to 2.5), predicted.")
    assert finding.time_lost_frac == pytest.approx(1 - 1 / 2.1)
    assert finding.entry() == {
        "id": "few",
        "severity": "high",
        "message": "61 % waits.",
        "advice": "",
        "evidence": {"wait_frac": 0.61},
        "change": ["loader.num_workers=4"],
        "changes_learning": False,
        "gain": {"factor": 2.1, "low": 1.5, "high": 2.5, "text": finding.expected},
        "text": finding.text,
    }


def test_advice_that_changes_what_is_learned_is_marked():
    finding = Finding("x", "It is so.", {}, ("workload.optimizer.lr=0.1",), changes_learning=True)
    assert finding.text == "It is so. Try: workload.optimizer.lr=0.1. This changes what is learned."


@pytest.mark.parametrize(("lost", "severity"), [(0.5, "high"), (0.2, "medium"), (0.05, "low"), (None, "low")])
def test_it_matters_by_the_share_of_time_that_is_lost(lost, severity):
    assert Finding("x", "", {}, lost_frac=lost).severity == severity
    assert Finding("x", "", {}, lost_frac=lost, is_note=True).severity == "info"


@pytest.mark.parametrize("bounds", [(2.0, 2.1, 3.0), (2.0, 1.0, 1.9), (0.0, 0.0, 1.0)])
def test_a_gain_lies_between_its_bounds(bounds):
    with pytest.raises(ValueError, match="not between"):
        Gain(*bounds)


def test_a_loss_of_speed_wins_nothing_back():
    assert Gain(0.8, 0.5, 1.0).lost_frac == 0
