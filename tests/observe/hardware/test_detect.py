from collections import namedtuple
from dataclasses import replace

import psutil
import pynvml
import pytest

from tests.fake_nvml.driver import DRIVER_NOT_LOADED, Scenario
from tests.fake_nvml.scripted import GIB, NOT_SUPPORTED, Card, ScriptedNvml
from wellfed.observe.hardware.detect import machine
from wellfed.observe.hardware.torch_cuda import TorchCuda
from wellfed.observe.machine_facts import GpuFacts
from wellfed.observe.nvml.session import NvmlSession

SMALL = Card("GPU-aaaa", "NVIDIA T4", 15 * GIB, used_bytes=GIB, capability=(7, 5))
LARGE = Card("GPU-bbbb", "NVIDIA H200", 140 * GIB)
TORCH_SMALL = GpuFacts(0, "aaaa", "Tesla T4", 14.6, "7.5")
TORCH_LARGE = GpuFacts(0, "bbbb", "NVIDIA H200", 139.8, "9.0")


def look(tmp_path, *cards, torch=None, environ=None, errors=None):
    library = ScriptedNvml(*cards, errors=errors)
    facts = machine(torch, nvml=NvmlSession(lambda: library), environ=environ or {}, root=tmp_path)
    assert library.num_open == 0
    return facts


def test_without_torch_nvmls_cards_count(tmp_path):
    facts = look(tmp_path, SMALL, LARGE, environ={"CUDA_VISIBLE_DEVICES": "1,0"})
    assert [(gpu.index, gpu.uuid, gpu.nvml_index) for gpu in facts.gpus] == [(0, "GPU-bbbb", 1), (1, "GPU-aaaa", 0)]
    small = facts.gpus[1]
    assert (small.memory_gib, small.free_gib, small.capability, small.name) == (15.0, 14.0, "7.5", "NVIDIA T4")
    assert (facts.nvml_problem, facts.torch_problem, facts.warnings[1:]) == (None, None, ())
    assert facts.versions["driver"] == "580.65"
    assert "cuda" not in facts.versions


def test_torchs_order_and_size_win_and_nvml_adds_the_rest(tmp_path):
    torch = TorchCuda((TORCH_LARGE, replace(TORCH_SMALL, index=1)), cuda="CUDA 12.8")
    facts = look(tmp_path, SMALL, LARGE, torch=torch)
    large, small = facts.gpus
    assert (large.index, large.uuid, large.nvml_index) == (0, "GPU-bbbb", 1)
    assert large.memory_gib == pytest.approx(139.8)
    assert large.free_gib == large.memory_gib  # NVML's 140 GiB free can't be more than torch's total
    assert (small.name, small.uuid, small.free_gib) == ("Tesla T4", "GPU-aaaa", 14.0)
    assert facts.versions["cuda"] == "CUDA 12.8"
    assert facts.warnings == ()


def test_cuda_without_nvml_takes_memory_from_torch_with_one_warning(tmp_path):
    torch = TorchCuda((TORCH_SMALL,), cuda="ROCm 6.4")
    facts = look(tmp_path, torch=torch, errors={"nvmlInit": pynvml.NVML_ERROR_LIBRARY_NOT_FOUND})
    (gpu,) = facts.gpus
    assert (gpu.uuid, gpu.nvml_index, gpu.free_gib) == ("aaaa", None, None)
    assert gpu.memory_gib == pytest.approx(14.6)
    (warning,) = facts.warnings
    assert warning.startswith("NVML: library not found. Memory is torch's; utilisation, power and clocks are absent.")
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in warning


def test_a_cpu_machine_is_not_warned(tmp_path):
    no_driver = {"nvmlInit": pynvml.NVML_ERROR_LIBRARY_NOT_FOUND}
    assert look(tmp_path, torch=TorchCuda(problem="built without CUDA"), errors=no_driver).warnings == ()


def test_torch_without_uuids_is_matched_by_index(tmp_path):
    nameless = GpuFacts(0, None, "NVIDIA H200", 139.0, "9.0")
    twin = Card("GPU-cccc", "NVIDIA H200", 140 * GIB)
    gpus = look(tmp_path, LARGE, twin, torch=TorchCuda((nameless, replace(nameless, index=1)))).gpus
    assert [(gpu.uuid, gpu.nvml_index) for gpu in gpus] == [("GPU-bbbb", 0), ("GPU-cccc", 1)]


def test_nvml_that_refuses_memory_leaves_torchs(tmp_path):
    shared = Card("GPU-bbbb", errors={"nvmlDeviceGetMemoryInfo": NOT_SUPPORTED})
    (gpu,) = look(tmp_path, shared, torch=TorchCuda((TORCH_LARGE,))).gpus
    assert (gpu.memory_gib, gpu.free_gib, gpu.nvml_index) == (TORCH_LARGE.memory_gib, None, 0)
    (gpu,) = look(tmp_path, shared).gpus
    assert (gpu.memory_gib, gpu.free_gib) == (None, None)


def test_a_card_that_torch_cannot_use_is_still_reported(tmp_path):
    facts = look(tmp_path, LARGE, torch=TorchCuda(problem="torch 2.13.0+cpu is built without CUDA"))
    assert [gpu.name for gpu in facts.gpus] == ["NVIDIA H200"]
    assert facts.training_gpus == ()
    assert facts.torch_problem == "torch 2.13.0+cpu is built without CUDA"


@pytest.mark.parametrize(
    ("cards", "environ", "errors", "problem"),
    [
        ([], {}, {"nvmlInit": pynvml.NVML_ERROR_DRIVER_NOT_LOADED}, "driver not loaded"),
        ([], {}, {"nvmlInit": pynvml.NVML_ERROR_UNKNOWN}, "unknown error"),
        ([], {}, {"nvmlDeviceGetCount": pynvml.NVML_ERROR_GPU_IS_LOST}, "GPU is lost"),
        ([], {}, {}, "no card found"),
        ([LARGE], {"CUDA_VISIBLE_DEVICES": ""}, {}, "none of 1 is visible (CUDA_VISIBLE_DEVICES='')"),
    ],
)
def test_no_card_says_why(tmp_path, cards, environ, errors, problem):
    facts = look(tmp_path, *cards, environ=environ, errors=errors)
    assert (facts.gpus, facts.nvml_problem, facts.warnings) == ((), problem, ())


def test_memory_is_the_smaller_of_host_and_cgroup(tmp_path, monkeypatch):
    host = namedtuple("host", "total available")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text(str(8 * GIB))
    (tmp_path / "sys/fs/cgroup/memory.current").write_text(str(3 * GIB))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: host(64 * GIB, 60 * GIB))
    facts = look(tmp_path)
    assert (facts.ram_gib, facts.ram_available_gib) == (8.0, 5.0)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: host(6 * GIB, 2 * GIB))
    facts = look(tmp_path)
    assert (facts.ram_gib, facts.ram_available_gib) == (6.0, 2.0)


def test_cpu_name_and_versions(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor : 0\nmodel name\t: A Good CPU @ 2 GHz\nmodel name\t: other\n")
    facts = look(tmp_path)
    assert facts.cpu == "A Good CPU @ 2 GHz"
    assert {"python", "wellfed", "nvidia-ml-py", "psutil"} <= facts.versions.keys()
    assert facts.host
    assert facts.os


def test_a_driver_that_fails_is_told_from_a_machine_without_one(tmp_path, fake_driver):
    with fake_driver.load(Scenario(init_error=DRIVER_NOT_LOADED)):
        facts = machine(environ={}, root=tmp_path)
    assert (facts.nvml_failed, facts.nvml_problem) == (True, "driver not loaded")
    assert not look(tmp_path, errors={"nvmlInit": pynvml.NVML_ERROR_LIBRARY_NOT_FOUND}).nvml_failed
    assert not look(tmp_path, LARGE).nvml_failed


def test_a_simulated_card_says_so(tmp_path):
    card = GpuFacts(0, "cccc", "Simulated GPU 24 GiB", 24.0, "9.0")
    facts = look(tmp_path, torch=TorchCuda(devices=(card,), cuda="CUDA 13.0"))
    assert [gpu.is_simulated for gpu in facts.gpus] == [True]
    assert any("simulated" in warning for warning in facts.warnings)
    real = look(tmp_path, torch=TorchCuda(devices=(TORCH_LARGE,), cuda="CUDA 13.0"))
    assert not real.gpus[0].is_simulated
    assert not any("simulated" in warning for warning in real.warnings)
