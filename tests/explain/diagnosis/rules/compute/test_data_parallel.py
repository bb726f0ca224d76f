"""One process with several cards is told to be several processes."""

from tests.kit.card_evidence import on_card
from tests.kit.evidence_of import evidence
from wellfed.explain.diagnosis.rules.compute import data_parallel


def test_a_process_for_each_card():
    found = data_parallel.check(on_card(events=[{"kind": "data_parallel", "devices": 4}], card={"util_pct": 40}))
    assert found is not None
    assert found.change == ("trainer.devices=4", "trainer.strategy=ddp")
    assert "drives 4 GPUs" in found.message
    assert found.gain is not None
    assert found.gain.high == 2.5


def test_without_nvml():
    found = data_parallel.check(on_card(events=[{"kind": "data_parallel", "devices": 2}], card={"util_pct": None}))
    assert found is not None
    assert found.gain is None


def test_where_it_has_nothing_to_share_out():
    found = data_parallel.check(evidence(events=[{"kind": "data_parallel", "module": "net", "devices": 0}]))
    assert found is not None
    assert found.change == ()
    assert found.message.startswith("The model contains a torch.nn.DataParallel (net)")


def test_silent():
    assert data_parallel.check(on_card()) is None
