import importlib.metadata
import threading
import time

import pynvml
import pytest

from tests.fake_nvml.scripted import GPU_IS_LOST, Card, ScriptedNvml
from wellfed.observe.nvml import session as door
from wellfed.observe.nvml.session import (
    START_S,
    FunctionNotFoundError,
    GpuLostError,
    LibraryNotFoundError,
    NoDataError,
    NotFoundError,
    NotSupportedError,
    NvmlAbsentError,
    NvmlError,
    NvmlSession,
    NvmlStuckError,
    VersionMismatchError,
    load_pynvml,
    unofficial_pynvml,
    within,
)

ABSENT = {
    "NVML_ERROR_NOT_SUPPORTED": NotSupportedError,
    "NVML_ERROR_NO_PERMISSION": NvmlAbsentError,
    "NVML_ERROR_DRIVER_NOT_LOADED": NvmlAbsentError,
    "NVML_ERROR_LIBRARY_NOT_FOUND": LibraryNotFoundError,
    "NVML_ERROR_FUNCTION_NOT_FOUND": FunctionNotFoundError,
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH": NvmlAbsentError,
    "NVML_ERROR_NO_DATA": NoDataError,
    "NVML_ERROR_ARGUMENT_VERSION_MISMATCH": VersionMismatchError,
}
BROKEN = {
    "NVML_ERROR_GPU_IS_LOST": GpuLostError,
    "NVML_ERROR_RESET_REQUIRED": GpuLostError,
    "NVML_ERROR_NOT_FOUND": NotFoundError,
    "NVML_ERROR_GPU_NOT_FOUND": NotFoundError,
}


@pytest.mark.parametrize(("name", "expected"), [*ABSENT.items(), *BROKEN.items()])
def test_a_code_becomes_its_type(name, expected):
    library = ScriptedNvml(errors={"nvmlDeviceGetCount": getattr(pynvml, name)})
    with NvmlSession(lambda: library) as nvml, pytest.raises(NvmlError) as caught:
        nvml.ask("nvmlDeviceGetCount")
    assert type(caught.value) is expected
    assert isinstance(caught.value, NvmlAbsentError) == (name in ABSENT)
    assert isinstance(caught.value.__cause__, pynvml.NVMLError)


def test_an_unlisted_code_keeps_its_text():
    library = ScriptedNvml(errors={"nvmlDeviceGetCount": pynvml.NVML_ERROR_TIMEOUT})
    with (
        NvmlSession(lambda: library) as nvml,
        pytest.raises(NvmlError, match=r"^NVML nvmlDeviceGetCount: timeout$") as e,
    ):
        nvml.ask("nvmlDeviceGetCount")
    assert type(e.value) is NvmlError


def test_opens_and_closes_once_also_when_the_block_fails():
    library = ScriptedNvml()
    nvml = NvmlSession(lambda: library)
    open_inside = []
    with pytest.raises(IndexError), nvml:
        open_inside.append(library.num_open) or open_inside[1]
    assert open_inside == [1]
    assert library.num_open == 0
    with pytest.raises(RuntimeError, match=r"with NvmlSession\(\) as nvml"):
        nvml.ask("nvmlDeviceGetCount")


def test_a_failing_shutdown_does_not_hide_the_result():
    library = ScriptedNvml(errors={"nvmlShutdown": GPU_IS_LOST})
    with NvmlSession(lambda: library) as nvml:
        assert nvml.ask("nvmlDeviceGetCount") == 0


def test_a_missing_driver_is_absent_and_leaves_nothing_open():
    library = ScriptedNvml(errors={"nvmlInit": pynvml.NVML_ERROR_DRIVER_NOT_LOADED})
    nvml = NvmlSession(lambda: library)
    with pytest.raises(NvmlAbsentError, match="driver not loaded") as caught, nvml:
        pass
    assert caught.value.reason == "driver not loaded"
    assert library.num_open == 0
    with pytest.raises(RuntimeError, match="outside its session"):
        nvml.constant("nvmlMemory_v2")


def test_what_this_pynvml_lacks_is_absent():
    with NvmlSession(ScriptedNvml) as nvml:
        assert nvml.constant("nvmlMemory_v2") == pynvml.nvmlMemory_v2
        with pytest.raises(FunctionNotFoundError, match="nvmlDeviceOfTomorrow"):
            nvml.ask("nvmlDeviceOfTomorrow")
        with pytest.raises(FunctionNotFoundError, match="NVML_OF_TOMORROW"):
            nvml.constant("NVML_OF_TOMORROW")


def test_arguments_reach_the_function():
    card = Card(total_bytes=8, reserved_bytes=3)
    with NvmlSession(lambda: ScriptedNvml(card)) as nvml:
        handle = nvml.ask("nvmlDeviceGetHandleByIndex", 0)
        assert nvml.ask("nvmlDeviceGetMemoryInfo", handle, version=1).reserved == 3


def test_the_real_module_is_loaded():
    assert load_pynvml() is pynvml


def test_no_pynvml_names_the_install_command(monkeypatch):
    def refuse(name):
        raise ImportError(name)

    monkeypatch.setattr(door.importlib, "import_module", refuse)
    with pytest.raises(NvmlAbsentError, match="pip install nvidia-ml-py"):
        load_pynvml()


def test_a_module_that_is_not_nvidias_is_refused(monkeypatch):
    monkeypatch.setattr(door.importlib, "import_module", lambda name: object())
    with pytest.raises(NvmlAbsentError, match="not nvidia-ml-py's"):
        load_pynvml()


def test_the_unofficial_distribution_is_named_with_the_uninstall_command():
    installed = {"pynvml": "11.5.3"}

    def version_of(name):
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    message = unofficial_pynvml(version_of)
    assert message is not None
    assert "pynvml 11.5.3" in message
    assert "pip uninstall pynvml && pip install --force-reinstall nvidia-ml-py" in message
    installed.clear()
    assert unofficial_pynvml(version_of) is None


def test_what_comes_in_time_is_handed_on():
    assert within(30, lambda: [1, 2]) == [1, 2]
    assert within(30, lambda: None) is None
    assert START_S > 1


def test_what_is_raised_in_time_is_raised_here():
    def fail():
        raise GpuLostError("nvmlInit")

    with pytest.raises(GpuLostError, match="NVML nvmlInit: GPU is lost"):
        within(30, fail)


def test_what_does_not_come_back_is_left_behind():
    gate, came_back = threading.Event(), threading.Event()

    def hang():
        gate.wait(30)
        came_back.set()
        raise GpuLostError("nvmlInit")  # nobody hears of it

    began_at_s = time.monotonic()
    with pytest.raises(NvmlStuckError, match=r"NVML driver: did not answer within 0\.03 s") as caught:
        within(0.03, hang)
    assert time.monotonic() - began_at_s < 15
    assert isinstance(caught.value, NvmlAbsentError)
    assert not came_back.is_set()
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "wellfed-nvml")
    assert thread.daemon  # nor does the process wait for it
    gate.set()
    thread.join(20)
    assert came_back.is_set()
