"""Who holds a card's memory, with the real pynvml."""

from tests.fake_nvml.driver import FakeGpu, FakeMig, Scenario
from wellfed.nvml.devices import list_devices
from wellfed.nvml.session import NvmlSession


def holders_of(fake_driver, *gpus, **more):
    with fake_driver.load(Scenario(list(gpus), **more)), NvmlSession() as nvml:
        return [device.holders for device in list_devices(nvml).devices]


def test_the_largest_comes_first_by_its_file_name(fake_driver):
    gpu = FakeGpu(processes=[(11, 1.5, "/usr/bin/python3.12"), (12, 20.0, "C:\\apps\\ollama.exe")])
    ((first, second),) = holders_of(fake_driver, gpu)
    assert (first.pid, first.name, first.memory_bytes) == (12, "ollama.exe", 20 * 2**30)
    assert (second.pid, second.name, second.memory_bytes) == (11, "python3.12", 1.5 * 2**30)


def test_a_process_without_a_name_is_listed_all_the_same(fake_driver):
    ((one,),) = holders_of(fake_driver, FakeGpu(processes=[(4711, 2.0)]))
    assert (one.pid, one.name) == (4711, None)


def test_a_card_that_nobody_uses_and_one_that_does_not_tell_have_none(fake_driver):
    refuses = {"nvmlDeviceGetComputeRunningProcesses_v3": 4, "nvmlDeviceGetGraphicsRunningProcesses_v3": 13}
    silent = FakeGpu("GPU-b", processes=[(1, 1.0)], errors=refuses)
    assert holders_of(fake_driver, FakeGpu("GPU-a"), silent) == [(), ()]


def test_an_instance_has_its_own(fake_driver):
    card = FakeGpu("GPU-a", mig=[FakeMig("MIG-a")], processes=[(9, 3.0, "python")])
    parent, instance = holders_of(fake_driver, card)
    assert [one.pid for one in parent] == [9]
    assert instance == ()
