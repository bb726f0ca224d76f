"""One process with several cards is told to be several processes."""

import pytest

from tests.kit.card_evidence import on_card
from tests.kit.evidence_of import evidence
from wellfed.explain.diagnosis.rules.compute_rules import data_parallel


def test_a_process_for_each_card():
    found = data_parallel(on_card(events=[{"kind": "data_parallel", "devices": 4}], card={"util_pct": 40}))
    assert found is not None
    assert found.change == ("trainer.devices=4", "trainer.strategy=ddp")
    assert "drives 4 GPUs" in found.message
    assert found.gain is not None
    assert found.gain.high == pytest.approx(2.5, rel=0.05)  # its compute takes nearly all of the time


def test_without_nvml():
    found = data_parallel(on_card(events=[{"kind": "data_parallel", "devices": 2}], card={"util_pct": None}))
    assert found is not None
    assert found.gain is None


def test_where_it_has_nothing_to_share_out():
    found = data_parallel(evidence(events=[{"kind": "data_parallel", "module": "net", "devices": 0}]))
    assert found is not None
    assert found.change == ()
    assert found.message.startswith("The model contains a torch.nn.DataParallel (net)")


def test_silent():
    assert data_parallel(on_card()) is None


def test_waiting_for_data_is_not_its_fault():
    """The cards are idle then, whatever divides the work among them."""
    found = data_parallel(
        on_card(events=[{"kind": "data_parallel", "devices": 4}], card={"util_pct": 40}, compute_ms=10.0, wait_ms=10.0)
    )
    assert found is not None
    assert found.gain is not None
    assert 1.05 < found.gain.high < 1.15  # a tenth of the time
