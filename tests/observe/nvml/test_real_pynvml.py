"""The door to NVML with the real pynvml, on a driver library that plays scenarios."""

import threading

import pynvml
import pytest

from tests.fake_nvml.driver import (
    DRIVER_NOT_LOADED,
    GIB,
    GPU_IS_LOST,
    MISMATCH,
    NO_PERMISSION,
    NOT_SUPPORTED,
    UNKNOWN,
    Failing,
    FakeGpu,
    FakeMig,
    Lost,
    Scenario,
)
from wellfed.observe.nvml.devices import list_devices
from wellfed.observe.nvml.session import (
    FunctionNotFoundError,
    GpuLostError,
    LibraryNotFoundError,
    NotFoundError,
    NotSupportedError,
    NvmlAbsentError,
    NvmlError,
    NvmlSession,
    VersionMismatchError,
)
from wellfed.observe.nvml.visible import visible_devices

RTX = FakeGpu("GPU-4090aaaa", "NVIDIA GeForce RTX 4090", 24, 1.5, 0.25, (8, 9))
H200 = FakeGpu("GPU-200bbbb", "NVIDIA H200", 140.5, 20, 0.5, (9, 0))
TWO = Scenario([RTX, H200], driver="580.65.06")


def devices_of(fake_driver, scenario):
    with fake_driver.load(scenario), NvmlSession() as nvml:
        return list_devices(nvml)


def handle_of(nvml, device):
    return nvml.ask("nvmlDeviceGetHandleByUUID", device.uuid)


def seen(fake_driver, visible, order=None, scenario=TWO):
    """(CUDA's index, name) of what CUDA_VISIBLE_DEVICES shows, and the notes."""
    found = visible_devices(devices_of(fake_driver, scenario), visible=visible, order=order)
    return [(device.index, device.name) for device in found.devices], found.notes


def test_two_different_cards_are_read_whole(fake_driver):
    first, second = devices_of(fake_driver, TWO).devices
    assert (first.nvml_index, first.uuid, first.name) == (0, "GPU-4090aaaa", "NVIDIA GeForce RTX 4090")
    assert (second.nvml_index, second.uuid, second.name) == (1, "GPU-200bbbb", "NVIDIA H200")
    sizes = [first.memory_total_bytes, first.memory_used_bytes, first.memory_free_bytes]
    assert sizes == [23.75 * GIB, 1.5 * GIB, 22.25 * GIB]
    sizes = [second.memory_total_bytes, second.memory_used_bytes, second.memory_free_bytes]
    assert sizes == [140 * GIB, 20 * GIB, 120 * GIB]
    assert [first.capability, second.capability] == [(8, 9), (9, 0)]
    assert first.driver_version == second.driver_version == "580.65.06"
    assert not any(device.is_mig or device.has_mig_mode for device in (first, second))


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["NVIDIA GeForce RTX 4090", "NVIDIA H200"]),
        ("0,1", ["NVIDIA GeForce RTX 4090", "NVIDIA H200"]),
        ("1,0", ["NVIDIA H200", "NVIDIA GeForce RTX 4090"]),
        ("1", ["NVIDIA H200"]),
        ("GPU-200bbbb,GPU-4090aaaa", ["NVIDIA H200", "NVIDIA GeForce RTX 4090"]),
        ("GPU-4090", ["NVIDIA GeForce RTX 4090"]),
        ("GPU-200bbbb,GPU-none,GPU-4090aaaa", ["NVIDIA H200"]),
        ("GPU-none", []),
        ("GPU-", []),  # either
        ("1,7,0", ["NVIDIA H200"]),
        ("", []),
    ],
)
def test_cards_are_numbered_as_cuda_numbers_them(fake_driver, visible, names):
    devices, notes = seen(fake_driver, visible, order="PCI_BUS_ID")
    assert devices == list(enumerate(names))
    assert notes == ()


@pytest.mark.parametrize("order", [None, "FASTEST_FIRST"])
def test_numbers_of_different_cards_are_not_certain_without_the_bus_order(fake_driver, order):
    for visible in (None, "1,0"):
        (note,) = seen(fake_driver, visible, order)[1]
        assert "NVIDIA GeForce RTX 4090, NVIDIA H200" in note
        assert "export CUDA_DEVICE_ORDER=PCI_BUS_ID" in note
    assert seen(fake_driver, "GPU-200bbbb", order) == ([(0, "NVIDIA H200")], ())
    alike = Scenario([FakeGpu("GPU-1"), FakeGpu("GPU-2")])
    assert seen(fake_driver, "1,0", order, alike)[1] == ()


def test_the_handle_of_a_visible_card_is_the_cards_own(fake_driver):
    with fake_driver.load(TWO), NvmlSession() as nvml:
        first = visible_devices(list_devices(nvml), visible="1,0", order="PCI_BUS_ID").devices[0]
        assert nvml.ask("nvmlDeviceGetName", handle_of(nvml, first)) == "NVIDIA H200"


def test_a_card_that_went_away_has_no_handle(fake_driver):
    with fake_driver.load(TWO) as driver, NvmlSession() as nvml:
        h200 = list_devices(nvml).devices[1]
        driver.switch(Scenario([RTX]))
        with pytest.raises(NotFoundError, match="nvmlDeviceGetHandleByUUID"):
            handle_of(nvml, h200)


def test_mig_instances_stand_for_their_card(fake_driver):
    instances = [FakeMig("MIG-1", "NVIDIA H200 MIG 1g.18gb", 16, 4, 0.5), None, FakeMig("MIG-2", total_gib=32)]
    split = FakeGpu("GPU-split", "NVIDIA H200", 140, capability=(9, 0), mig=instances)
    scenario = Scenario([split, FakeGpu("GPU-whole", "NVIDIA H200", mig_capable=True)])
    card, first, second, whole = devices_of(fake_driver, scenario).devices
    assert [card.has_mig_mode, whole.has_mig_mode] == [True, False]
    assert [device.uuid for device in (first, second)] == ["MIG-1", "MIG-2"]
    assert first.is_mig
    assert second.is_mig
    assert [first.nvml_index, second.nvml_index, whole.nvml_index] == [0, 0, 1]
    assert [first.memory_total_bytes, first.memory_free_bytes] == [15.5 * GIB, 11.5 * GIB]
    assert (first.name, first.capability) == ("NVIDIA H200 MIG 1g.18gb", (9, 0))
    assert seen(fake_driver, "MIG-2", None, scenario)[0] == [(0, second.name)]
    assert seen(fake_driver, "1", None, scenario)[0] == [(0, "NVIDIA H200")]
    assert seen(fake_driver, "0", None, scenario)[0] == [(0, first.name)]
    assert seen(fake_driver, "GPU-split", None, scenario)[0] == []


def test_an_instance_refuses_utilisation_as_not_supported(fake_driver):
    split = FakeGpu("GPU-split", mig=[FakeMig("MIG-1")])
    with fake_driver.load(Scenario([split])), NvmlSession() as nvml:
        for device in list_devices(nvml).devices:
            with pytest.raises(NotSupportedError):
                nvml.ask("nvmlDeviceGetUtilizationRates", handle_of(nvml, device))


@pytest.mark.parametrize(
    ("code", "expected", "is_absent", "reason"),
    [
        (DRIVER_NOT_LOADED, NvmlAbsentError, True, "driver not loaded"),
        (MISMATCH, NvmlAbsentError, True, "driver and library versions differ, reboot to load the new driver"),
        (NO_PERMISSION, NvmlAbsentError, True, "no permission"),
        (UNKNOWN, NvmlError, False, "unknown error"),
    ],
)
def test_opening_says_why_it_can_not(fake_driver, code, expected, is_absent, reason):
    with fake_driver.load(Scenario([RTX], init_error=code)) as driver:
        with pytest.raises(NvmlError) as caught, NvmlSession():
            pass
        assert driver.num_users() == 0
    assert type(caught.value) is expected
    assert isinstance(caught.value, NvmlAbsentError) == is_absent
    assert caught.value.reason == reason


def test_no_library_is_absent(monkeypatch):
    asked_for = []

    def refuse(name):
        asked_for.append(name)
        raise OSError(name)

    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setattr(pynvml, "CDLL", refuse)
    with pytest.raises(LibraryNotFoundError, match="library not found"), NvmlSession():
        pass
    assert asked_for == ["libnvidia-ml.so.1"]


def test_a_driver_without_memory_version_2_counts_the_reserve_as_used(fake_driver):
    (device,) = devices_of(fake_driver.without("nvmlDeviceGetMemoryInfo_v2"), Scenario([RTX])).devices
    sizes = [device.memory_total_bytes, device.memory_used_bytes, device.memory_free_bytes]
    assert sizes == [24 * GIB, 1.75 * GIB, 22.25 * GIB]


def test_a_driver_older_than_mig_has_whole_cards(fake_driver):
    older = fake_driver.without("nvmlDeviceGetMigMode", "nvmlDeviceGetMaxMigDeviceCount")
    assert [device.has_mig_mode for device in devices_of(older, TWO).devices] == [False, False]


def test_what_the_library_lacks_is_absent(fake_driver):
    with fake_driver.without("nvmlDeviceGetCount_v2").load(TWO), NvmlSession() as nvml:
        with pytest.raises(FunctionNotFoundError, match="nvmlDeviceGetCount: function not found in this driver"):
            list_devices(nvml)
        handle = nvml.ask("nvmlDeviceGetHandleByIndex", 0)
        with pytest.raises(VersionMismatchError):
            nvml.ask("nvmlDeviceGetMemoryInfo", handle, version=0x03000028)


def test_what_a_card_refuses_is_absent_and_the_others_are_whole(fake_driver):
    refused = ["nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetCudaComputeCapability"]
    poor = FakeGpu("GPU-poor", errors=dict.fromkeys([*refused, "nvmlDeviceGetName"], NOT_SUPPORTED))
    first, second = devices_of(fake_driver, Scenario([poor, RTX])).devices
    assert first.memory_total_bytes is first.memory_used_bytes is first.memory_free_bytes is first.capability is None
    assert first.name == "NVIDIA GPU"
    assert second.memory_total_bytes == 23.75 * GIB


def test_no_driver_version_is_absent(fake_driver):
    scenario = Scenario([RTX], errors={"nvmlSystemGetDriverVersion": NO_PERMISSION})
    assert devices_of(fake_driver, scenario).devices[0].driver_version is None


def test_a_lost_card_leaves_the_others_and_keeps_its_number(fake_driver):
    lost = FakeGpu("GPU-lost", lost=Lost())
    found = devices_of(fake_driver, Scenario([lost, RTX]))
    assert [(device.nvml_index, device.uuid) for device in found.devices] == [(1, "GPU-4090aaaa")]
    assert found.notes == ("card 0 is left out (NVML nvmlDeviceGetHandleByIndex: GPU is lost).",)


def test_a_card_lost_while_open_is_an_error_and_closing_is_not(fake_driver):
    with fake_driver.load(Scenario([FakeGpu("GPU-1", lost=Lost(10))], errors={})) as driver:
        with NvmlSession() as nvml:
            handle = nvml.ask("nvmlDeviceGetHandleByIndex", 0)
            driver.advance(10)
            with pytest.raises(GpuLostError, match="GPU is lost"):
                nvml.ask("nvmlDeviceGetPowerUsage", handle)
            driver.switch(Scenario([RTX], errors={"nvmlShutdown": GPU_IS_LOST}))
        assert driver.num_users() == 1  # nvmlShutdown refused, and nobody was told


def test_an_unlisted_code_has_the_drivers_text(fake_driver):
    scenario = Scenario([RTX], errors={"nvmlDeviceGetCount_v2": UNKNOWN})
    with pytest.raises(NvmlError, match="^NVML nvmlDeviceGetCount: unknown error$") as caught:
        devices_of(fake_driver, scenario)
    assert type(caught.value) is NvmlError


def test_a_flaky_driver_costs_the_cards_it_fails_for_and_no_more(fake_driver):
    # The calls about a card: handle, MIG mode, capability, memory, UUID, name, power limit, processes twice; the 12th
    # is the second card's capability.
    cards = [FakeGpu(f"GPU-{number}") for number in range(2)]
    found = devices_of(fake_driver, Scenario(cards, fail_every=12))
    assert [device.uuid for device in found.devices] == ["GPU-0"]
    assert found.notes == ("card 1 is left out (NVML nvmlDeviceGetCudaComputeCapability: unknown error).",)
    found = devices_of(fake_driver, Scenario(cards, fail_every=12, fail_code=NOT_SUPPORTED))
    assert [device.uuid for device in found.devices] == ["GPU-0", "GPU-1"]


@pytest.mark.parametrize("fail_every", range(4, 30))
def test_three_tries_find_every_device_whatever_call_stumbles(fake_driver, fail_every):
    split = FakeGpu("GPU-split", mig=[FakeMig("MIG-1"), None, FakeMig("MIG-2"), None])
    with fake_driver.load(Scenario([split, RTX], fail_every=fail_every)), NvmlSession(tries=3) as nvml:
        found = list_devices(nvml)
    assert [device.uuid for device in found.devices] == ["GPU-split", "MIG-1", "MIG-2", RTX.uuid]
    assert found.notes == ()


def test_a_failing_instance_costs_itself_alone(fake_driver):
    refuses = FakeMig("MIG-1", errors={"nvmlDeviceGetUUID": UNKNOWN})
    found = devices_of(fake_driver, Scenario([FakeGpu("GPU-split", mig=[refuses, FakeMig("MIG-2")]), RTX]))
    assert [device.uuid for device in found.devices] == ["GPU-split", "MIG-2", "GPU-4090aaaa"]
    assert found.notes == ("instance 0 of card 0 is left out (NVML nvmlDeviceGetUUID: unknown error).",)


def test_a_card_that_is_left_out_makes_numbers_uncertain(fake_driver):
    away = FakeGpu("GPU-away", errors={"nvmlDeviceGetUUID": UNKNOWN})
    found = devices_of(fake_driver, Scenario([away, RTX]))
    note = "a card is left out, so CUDA's numbers may be others. Set CUDA_VISIBLE_DEVICES by UUID."
    assert note in visible_devices(found, visible="0", order="PCI_BUS_ID").notes
    assert note not in visible_devices(found, visible="GPU-4090aaaa", order="PCI_BUS_ID").notes
    whole = devices_of(fake_driver, Scenario([RTX]))
    assert note not in visible_devices(whole, visible="0", order="PCI_BUS_ID").notes


def test_a_figure_that_fails_for_a_while_is_back_afterwards(fake_driver):
    gpu = FakeGpu(power_w=300, errors={"nvmlDeviceGetPowerUsage": Failing(NO_PERMISSION, 10, 20)})
    with fake_driver.load(Scenario([gpu])) as driver, NvmlSession() as nvml:
        handle = nvml.ask("nvmlDeviceGetHandleByIndex", 0)
        assert nvml.ask("nvmlDeviceGetPowerUsage", handle) == 300_000
        driver.advance(10)
        with pytest.raises(NvmlAbsentError, match="no permission"):
            nvml.ask("nvmlDeviceGetPowerUsage", handle)
        driver.advance(10)
        assert nvml.ask("nvmlDeviceGetPowerUsage", handle) == 300_000


def test_sessions_of_two_threads_overlap(fake_driver):
    totals = []

    def look(nvml):
        totals.extend(device.memory_total_bytes for _ in range(20) for device in list_devices(nvml).devices)

    def open_and_look():
        with NvmlSession() as nvml:
            look(nvml)

    with fake_driver.load(TWO) as driver:
        with NvmlSession() as nvml:
            thread = threading.Thread(target=open_and_look)
            thread.start()
            look(nvml)
            thread.join()
            look(nvml)  # the other session's end did not close this one
        assert driver.num_users() == 0
    assert (totals.count(23.75 * GIB), totals.count(140 * GIB)) == (60, 60)
