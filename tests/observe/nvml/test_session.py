import pynvml
import pytest

from tests.fake_nvml.driver import DRIVER_NOT_LOADED, MISMATCH, FakeGpu, Lost, Scenario
from tests.fake_nvml.scripted import GPU_IS_LOST, ScriptedNvml
from wellfed.observe.nvml.session import NvmlError, NvmlSession


@pytest.mark.parametrize(
    ("name", "is_absent", "is_lost"),
    [
        ("NOT_SUPPORTED", True, False),
        ("NO_PERMISSION", True, False),
        ("FUNCTION_NOT_FOUND", True, False),
        ("NO_DATA", True, False),
        ("NOT_FOUND", False, False),
        ("GPU_IS_LOST", False, True),
        ("RESET_REQUIRED", False, True),
        ("UNKNOWN", False, False),
    ],
)
def test_an_error_has_the_drivers_code(name, is_absent, is_lost):
    code = getattr(pynvml, f"NVML_ERROR_{name}")
    library = ScriptedNvml(errors={"nvmlDeviceGetCount": code})
    with NvmlSession(lambda: library) as nvml, pytest.raises(NvmlError) as caught:
        nvml.ask("nvmlDeviceGetCount")
    assert (caught.value.code, caught.value.is_absent, caught.value.is_lost) == (code, is_absent, is_lost)
    assert isinstance(caught.value.__cause__, pynvml.NVMLError)
    assert caught.value.reason


def test_a_session_opens_and_closes_once_also_when_the_block_fails():
    library = ScriptedNvml()
    nvml = NvmlSession(lambda: library)
    open_inside = []
    with pytest.raises(IndexError), nvml:
        open_inside.append(library.num_open) or open_inside[1]
    assert (open_inside, library.num_open) == ([1], 0)


def test_a_failing_shutdown_does_not_hide_the_result():
    library = ScriptedNvml(errors={"nvmlShutdown": GPU_IS_LOST})
    with NvmlSession(lambda: library) as nvml:
        assert nvml.ask("nvmlDeviceGetCount") == 0


def test_what_this_pynvml_lacks_is_absent():
    with NvmlSession(ScriptedNvml) as nvml:
        assert nvml.constant("nvmlMemory_v2") == pynvml.nvmlMemory_v2
        for ask in (nvml.ask, nvml.constant):
            with pytest.raises(NvmlError, match="OfTomorrow") as caught:
                ask("nvmlDeviceOfTomorrow")
            assert caught.value.is_absent


@pytest.mark.parametrize(("code", "reason"), [(DRIVER_NOT_LOADED, "driver not loaded"), (MISMATCH, "reboot")])
def test_opening_names_the_reason(fake_driver, code, reason):
    with fake_driver.load(Scenario([FakeGpu()], init_error=code)) as driver:
        with pytest.raises(NvmlError) as caught, NvmlSession():
            pass
        assert driver.num_users() == 0
    assert caught.value.is_absent
    assert reason in caught.value.reason


def test_a_function_that_the_driver_lacks_is_absent(fake_driver):
    older = fake_driver.without("nvmlDeviceGetCount_v2")
    with (
        older.load(Scenario([FakeGpu()])),
        NvmlSession() as nvml,
        pytest.raises(NvmlError, match="nvmlDeviceGetCount: function not found") as caught,
    ):
        nvml.ask("nvmlDeviceGetCount")
    assert caught.value.is_absent


def test_a_card_lost_while_open_is_an_error_and_closing_is_not(fake_driver):
    with fake_driver.load(Scenario([FakeGpu("GPU-1", lost=Lost(10))])) as driver:
        with NvmlSession() as nvml:
            handle = nvml.ask("nvmlDeviceGetHandleByIndex", 0)
            driver.advance(10)
            with pytest.raises(NvmlError, match="GPU is lost"):
                nvml.ask("nvmlDeviceGetPowerUsage", handle)
        assert driver.num_users() == 0
