import pytest

from tests.fake_nvml.driver import DRIVER_NOT_LOADED, NO_PERMISSION, UNKNOWN, FakeGpu, FakeMig, Scenario
from wellfed.errors import ConfigError
from wellfed.watch.seen_gpus import find_gpus

SPLIT = FakeGpu("GPU-b", mig=[FakeMig("MIG-1", "H200 MIG 1g.18gb"), None, FakeMig("MIG-2", "H200 MIG 1g.18gb")])


def gpus_of(fake_driver, *gpus, **scenario):
    with fake_driver.load(Scenario(list(gpus), **scenario)):
        return find_gpus()


def test_all_cards_are_seen_whatever_cuda_shows(fake_driver, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    found = gpus_of(fake_driver, FakeGpu("GPU-a", total_gib=24, reserved_gib=0.5), FakeGpu("GPU-c", "Simulated GPU"))
    assert [(gpu.index, gpu.uuid) for gpu in found.gpus] == [(0, "GPU-a"), (1, "GPU-c")]
    assert (found.problem, found.notes) == (None, ())
    first, second = found.gpus
    assert (first.title, first.memory_gib, first.has_utilisation) == ("GPU 0 NVIDIA H200", 23.5, True)
    assert [first.is_simulated, second.is_simulated] == [False, True]


def test_instances_count_on_from_the_last_card(fake_driver):
    found = gpus_of(fake_driver, FakeGpu("GPU-a"), SPLIT, FakeGpu("GPU-c"))
    listed = [(gpu.index, gpu.uuid, gpu.has_utilisation) for gpu in found.gpus]
    assert listed == [
        (0, "GPU-a", True), (1, "GPU-b", False), (3, "MIG-1", False), (4, "MIG-2", False), (2, "GPU-c", True)
    ]  # fmt: skip
    assert found.gpus[2].title == "GPU 3 H200 MIG 1g.18gb of GPU 1"


@pytest.mark.parametrize(
    ("scenario", "problem"),
    [
        ({"init_error": DRIVER_NOT_LOADED}, "driver not loaded"),
        ({"init_error": NO_PERMISSION}, "no permission"),
        ({}, "no card found"),
    ],
)
def test_why_there_is_none(fake_driver, scenario, problem):
    found = gpus_of(fake_driver, **scenario)
    assert (found.gpus, found.problem) == ((), problem)


def test_a_card_that_fails_is_left_out_with_a_note(fake_driver):
    failing = FakeGpu("GPU-b", errors={"nvmlDeviceGetUUID": UNKNOWN})
    found = gpus_of(fake_driver, failing, FakeGpu("GPU-a"))
    assert [(gpu.index, gpu.uuid) for gpu in found.gpus] == [(1, "GPU-a")]
    assert found.notes == ("card 0 is left out (NVML nvmlDeviceGetUUID: unknown error).",)


def test_some_may_be_chosen(fake_driver):
    found = gpus_of(fake_driver, FakeGpu("GPU-a"), SPLIT)
    assert [gpu.index for gpu in found.only([3, 0]).gpus] == [0, 3]
    with pytest.raises(ConfigError) as raised:
        found.only([0, 9])
    assert "--gpus 0,9: no GPU has the number 9: there are 0, 1, 2, 3." in str(raised.value)
