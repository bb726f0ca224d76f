"""The functions of torch._C and torch.cuda that a build without CUDA lacks."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import torch
import torch.cuda


def fill_in(driver: ModuleType, devices: int, total: int) -> None:
    properties = SimpleNamespace(
        name=f"Simulated GPU {total / 2**30:g} GiB", major=9, minor=0, total_memory=total, multi_processor_count=8, uuid=None, is_integrated=False,
        is_multi_gpu_board=False, max_threads_per_multi_processor=2048, warp_size=32, regs_per_multiprocessor=65536, gcnArchName="", L2_cache_size=1 << 20,
    )  # fmt: skip
    nothing = lambda *args, **kwargs: None  # noqa: E731
    given = dict(
        getDeviceCount=lambda: devices, init=nothing, isInBadFork=driver.forked, getDevice=driver.device,
        setDevice=driver.set_device, exchangeDevice=driver.exchange_device, maybeExchangeDevice=driver.exchange_device,
        getCompiledVersion=lambda: 13000, getArchFlags=lambda: "sm_90", synchronize=driver.synchronize,
        getCurrentStream=driver.current_stream, getDefaultStream=driver.default_stream, setStream=driver.set_stream,
        setMemoryFraction=driver.set_fraction, getMemoryFraction=driver.fraction, emptyCache=driver.empty_cache,
        memoryStats=driver.stats, resetPeakMemoryStats=driver.reset_peak, resetAccumulatedMemoryStats=nothing,
        get_sync_debug_mode=lambda: 0, set_sync_debug_mode=nothing, canDeviceAccessPeer=lambda a, b: True,
        getAllocatorBackend=lambda: "native", ipc_collect=nothing, isCurrentStreamCapturing=lambda: False,
        isHistoryEnabled=lambda: False, sleep=nothing, clearCublasWorkspaces=nothing,
        getCurrentBlasHandle=lambda: 0,
        getCurrentRawStream=lambda device: driver.current_stream(device)[0], hostMemoryStats=dict,
    )  # fmt: skip
    for name, value in given.items():
        setattr(torch._C, f"_cuda_{name}", value)
    torch._C._nccl_version, torch._C._nccl_version_suffix = lambda: (2 << 32) | (27 << 16), lambda: b""
    torch._C._has_cuda = True
    torch.version.cuda = "13.0"
    cuda = torch.cuda
    cuda._exchange_device, cuda._maybe_exchange_device = driver.exchange_device, driver.exchange_device
    cuda._cudart = SimpleNamespace(
        cudaMemGetInfo=driver.memory_info,
        cudaError=int,
        cudaGetErrorString=str,
        cudaProfilerStart=nothing,
        cudaProfilerStop=nothing,
    )
    cuda._get_device_properties = lambda device: properties
    cuda.get_device_properties = lambda device=None: properties
    cuda.default_generators = tuple(driver.generator(index) for index in range(devices))
    cuda._check_cubins = cuda._check_capability = nothing
    cuda._queued_calls.clear()

    def to(self, device, non_blocking=False):  # torch.load with its map_location
        device = torch.device(device)
        if device.type != "cuda" or self.device == device:
            return to_before(self, device, non_blocking)
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(self).to(device).untyped_storage()

    def resize_(self, size):  # FSDP
        return driver.resize_storage(self, size) if self.device.type == "cuda" else resize_before(self, size)

    to_before, resize_before = torch.UntypedStorage.to, torch.UntypedStorage.resize_
    torch.UntypedStorage.to, torch.UntypedStorage.resize_ = to, resize_
