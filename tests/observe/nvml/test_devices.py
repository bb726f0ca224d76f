from types import SimpleNamespace

import pytest

from tests.fake_nvml.driver import FakeGpu, Scenario
from tests.fake_nvml.scripted import GIB, GPU_IS_LOST, NOT_SUPPORTED, Card, ScriptedNvml
from wellfed.observe.nvml.devices import list_devices, list_holders
from wellfed.observe.nvml.session import NvmlError, NvmlSession

RESERVE = 512 * 2**20


def devices_of(*cards, **library):
    with NvmlSession(lambda: ScriptedNvml(*cards, **library)) as nvml:
        return list_devices(nvml)


def test_a_card_is_read_whole():
    card = Card("GPU-1", "NVIDIA H200", 140 * GIB, 5 * GIB, RESERVE, (9, 0))
    found = devices_of(card, driver="580.65")
    (device,) = found.devices
    assert (device.nvml_index, device.uuid, device.name) == (0, "GPU-1", "NVIDIA H200")
    assert (device.memory_gib, device.free_gib) == (139.5, 134.5)
    assert (device.capability, found.driver) == ("9.0", "580.65")
    assert (device.is_mig, device.index) == (False, 0)


def test_what_a_card_refuses_is_absent():
    refused = ["nvmlDeviceGetMemoryInfo", "nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetName"]
    found = devices_of(
        Card(errors=dict.fromkeys([*refused, "nvmlDeviceGetMigMode"], NOT_SUPPORTED)),
        errors={"nvmlSystemGetDriverVersion": NOT_SUPPORTED},
    )
    (device,) = found.devices
    assert device.memory_gib is device.free_gib is device.capability is found.driver is None
    assert device.name == "NVIDIA GPU"
    assert not device.has_mig_mode


def test_a_lost_card_leaves_the_others():
    lost = Card("GPU-lost", errors={"nvmlDeviceGetHandleByIndex": GPU_IS_LOST})
    found = devices_of(lost, Card("GPU-well"))
    assert [(device.nvml_index, device.uuid) for device in found.devices] == [(1, "GPU-well")]
    assert found.notes == ("card 0 is left out (NVML nvmlDeviceGetHandleByIndex: GPU is lost).",)


def test_cards_that_cannot_be_counted_are_an_error():
    with pytest.raises(NvmlError, match="nvmlDeviceGetCount"):
        devices_of(errors={"nvmlDeviceGetCount": GPU_IS_LOST})


def test_mig_instances_follow_their_card():
    first = Card("MIG-1", "NVIDIA A100 MIG 1g.5gb", 5 * GIB, GIB)
    second = Card("MIG-2", "NVIDIA A100 MIG 3g.20gb", 20 * GIB)
    split = Card("GPU-split", "NVIDIA A100", 40 * GIB, capability=(8, 0), slots=[first, None, second])
    found = devices_of(Card("GPU-whole"), split).devices
    assert [device.uuid for device in found] == ["GPU-whole", "GPU-split", "MIG-1", "MIG-2"]
    assert [device.is_mig for device in found] == [False, False, True, True]
    assert [device.has_mig_mode for device in found] == [False, True, False, False]
    assert [device.nvml_index for device in found] == [0, 1, 1, 1]
    assert (found[2].memory_gib, found[2].free_gib, found[3].capability) == (5, 4, "8.0")
    assert found[3].name == "NVIDIA A100 MIG 3g.20gb"


def holders_of(fake_driver, *gpus, **more):
    with fake_driver.load(Scenario(list(gpus), **more)), NvmlSession() as nvml:
        return [device.holders for device in list_devices(nvml).devices]


def test_the_largest_comes_first_by_its_file_name(fake_driver):
    gpu = FakeGpu(processes=[(11, 1.5, "/usr/bin/python3.12"), (12, 20.0, "C:\\apps\\ollama.exe")])
    ((first, second),) = holders_of(fake_driver, gpu)
    assert (first.pid, first.name, first.memory_gib) == (12, "ollama.exe", 20.0)
    assert (second.pid, second.name, second.memory_gib) == (11, "python3.12", 1.5)


def test_a_process_of_both_lists_keeps_the_memory_that_one_of_them_knows():
    class Lists:
        def ask(self, function, *args):
            if function == "nvmlSystemGetProcessName":
                return "python"
            is_compute = "Compute" in function
            sizes = {7: 5 if is_compute else None, 8: None}
            return [SimpleNamespace(pid=pid, usedGpuMemory=size and size * GIB) for pid, size in sizes.items()]

    assert [(one.pid, one.memory_gib) for one in list_holders(Lists(), None)] == [(7, 5), (8, None)]
