import sys
import warnings
from types import SimpleNamespace

import pytest

from wellfed.observe.hardware.torch_cuda import IMPORT_FAILED, torch_cuda


def fake_torch(monkeypatch, *, cuda="12.8", hip=None, count=0, **functions):
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=150 * 2**30, major=9, minor=0, uuid="bbbb")
    module = SimpleNamespace(
        __version__="2.13.0",
        version=SimpleNamespace(cuda=cuda, hip=hip),
        cuda=SimpleNamespace(
            **{
                "is_available": lambda: count > 0,
                "device_count": lambda: count,
                "get_device_properties": lambda index: properties,
                **functions,
            }
        ),
    )
    monkeypatch.setitem(sys.modules, "torch", module)
    return properties


def test_devices_as_torch_reports_them(monkeypatch):
    fake_torch(monkeypatch, count=2)
    seen = torch_cuda()
    assert len(seen.devices) == 2
    device = seen.devices[0]
    assert (device.uuid, device.name, device.memory_gib) == ("bbbb", "NVIDIA H200", 150)
    assert (device.capability, seen.cuda, seen.problem) == ("9.0", "CUDA 12.8", None)


def test_a_build_without_cuda(monkeypatch):
    fake_torch(monkeypatch, cuda=None)
    assert torch_cuda().problem == "torch 2.13.0 is built without CUDA"


def test_torchs_own_warning_is_the_reason(monkeypatch):
    def too_old():
        warnings.warn("CUDA initialization: The NVIDIA driver on your system is too old.\nUpdate it.", stacklevel=1)
        return False

    fake_torch(monkeypatch, is_available=too_old)
    seen = torch_cuda()
    assert seen.problem == "CUDA initialization: The NVIDIA driver on your system is too old"
    assert seen.notes == ()


@pytest.mark.parametrize("error", [RuntimeError("CUDA unknown error - reboot.\nmore"), AssertionError("Invalid id")])
def test_a_failing_initialisation_is_a_problem(monkeypatch, error):
    def fail(index):
        raise error

    fake_torch(monkeypatch, count=1, get_device_properties=fail)
    seen = torch_cuda()
    assert seen.devices == ()
    assert seen.problem in ("CUDA unknown error - reboot", "Invalid id")


def test_no_torch_is_a_problem(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert torch_cuda().problem.startswith(f"{IMPORT_FAILED} (")
