"""The functions of torch._C and torch.cuda that a build without CUDA lacks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any
from uuid import UUID

import torch
import torch.cuda

import fake_cuda

CUDA_VERSION, NCCL_VERSION = (13, 0), (2, 27, 0)


@dataclass(frozen=True)
class Properties:
    """What ``torch.cuda.get_device_properties`` tells of a card; a made-up one."""

    total_memory: int
    uuid: UUID
    name: str
    major: int
    minor: int
    multi_processor_count: int
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    regs_per_multiprocessor: int = 65536
    shared_memory_per_block: int = 49152
    shared_memory_per_block_optin: int = 232448
    shared_memory_per_multiprocessor: int = 233472
    L2_cache_size: int = 1 << 20
    warp_size: int = 32
    clock_rate: int = 1_500_000
    memory_clock_rate: int = 2_600_000
    memory_bus_width: int = 5120
    is_integrated: bool = False
    is_multi_gpu_board: bool = False
    gcnArchName: str = ""  # noqa: N815  torch's name
    pci_bus_id: int = 0
    pci_device_id: int = 0
    pci_domain_id: int = 0


def fill_in(driver: ModuleType, cards: list[int], total_bytes: int) -> None:
    """Add them.

    Args:
        driver: the compiled one.
        cards: the machine's numbers of the cards that this process sees.
        total_bytes: memory of a card.
    """
    for name, function in _of_c(driver, len(cards)).items():
        setattr(torch._C, f"_cuda_{name}", function)
    major, minor, patch = NCCL_VERSION
    torch._C._nccl_version = lambda: (major << 32) | (minor << 16) | patch  # type: ignore[attr-defined]
    torch._C._nccl_version_suffix = lambda: b""  # type: ignore[attr-defined]
    # What torch.compile imports where it would record CUDA graphs; it gives up later, as there is no Triton.
    torch._C._cuda_CUDAAllocator_AllocatorState = type("AllocatorState", (), {})  # type: ignore[attr-defined]
    torch._C._set_cached_tensors_enabled = _nothing  # type: ignore[attr-defined]
    torch._C._has_cuda = True
    torch.version.cuda = ".".join(map(str, CUDA_VERSION))
    name = f"Simulated GPU {total_bytes / 2**30:g} GiB"
    shape = (*fake_cuda.capability(), fake_cuda.num_sms())
    uuids = [UUID(fake_cuda.uuid(card).removeprefix("GPU-")) for card in cards]
    properties = [Properties(total_bytes, uuid, name, *shape) for uuid in uuids]
    _fill_in_cuda(driver, properties)
    _fill_in_storages(driver)
    _fill_in_parallel()


def _of_c(driver: ModuleType, num_cards: int) -> dict[str, Callable[..., Any]]:
    """``torch._C._cuda_<name>`` -> function."""
    return {
        "init": driver.initialise,
        "getDeviceCount": lambda: num_cards,
        "isInBadFork": driver.is_forked,
        "getDevice": driver.device,
        "setDevice": driver.set_device,
        "exchangeDevice": driver.exchange_device,
        "maybeExchangeDevice": driver.exchange_device,
        "canDeviceAccessPeer": lambda device, peer: False,
        "getCompiledVersion": lambda: CUDA_VERSION[0] * 1000 + CUDA_VERSION[1] * 10,
        "getArchFlags": lambda: "sm_{}{}".format(*fake_cuda.capability()),
        "synchronize": driver.synchronize,
        "getCurrentStream": driver.current_stream,
        "getDefaultStream": driver.default_stream,
        "setStream": driver.set_stream,
        "getCurrentRawStream": lambda device: driver.current_stream(device)[0],
        "isCurrentStreamCapturing": driver.is_capturing,
        "sleep": _nothing,
        "get_sync_debug_mode": driver.sync_debug,
        "set_sync_debug_mode": _set_sync_debug(driver),
        "getCurrentBlasHandle": lambda: 0,
        "clearCublasWorkspaces": _nothing,
        "ipc_collect": _nothing,
        "getAllocatorBackend": lambda: "native",
        "setMemoryFraction": driver.set_fraction,
        "getMemoryFraction": driver.fraction,
        "emptyCache": driver.empty_cache,
        "memoryStats": driver.memory_stats,
        "memorySnapshot": lambda *arguments: driver.memory_snapshot(),
        "resetPeakMemoryStats": driver.reset_peak_stats,
        "resetAccumulatedMemoryStats": driver.reset_accumulated_stats,
        "hostMemoryStats": dict,
        "isHistoryEnabled": lambda: False,
    }


def _set_sync_debug(driver: ModuleType) -> Callable[[int], None]:
    told: list[bool] = []

    def set_sync_debug(mode: int) -> None:
        if not told:  # once a process; torch's words
            told.append(True)
            words = "Synchronization debug mode is a prototype feature and does not yet detect all"
            warnings.warn(f"{words} synchronizing operations", stacklevel=2)
        driver.set_sync_debug(mode)

    return set_sync_debug


def _fill_in_cuda(driver: ModuleType, properties: list[Properties]) -> None:
    cuda: Any = torch.cuda

    def get_device_properties(device: torch.types.Device = None) -> Properties:
        cuda._lazy_init()
        return properties[_checked(cuda._utils._get_device_index(device, optional=True), len(properties))]

    cuda._is_in_bad_fork = driver.is_forked
    cuda._exchange_device = driver.exchange_device
    cuda._maybe_exchange_device = lambda card: driver.exchange_device(card)  # noqa: PLW0108  torch.compile wants two
    cuda._cudart = SimpleNamespace(
        cudaMemGetInfo=driver.memory_info,
        cudaError=int,
        cudaGetErrorString=str,
        cudaProfilerStart=_nothing,
        cudaProfilerStop=_nothing,
    )
    cuda._get_device_properties = properties.__getitem__
    cuda.get_device_properties = get_device_properties
    cuda.graphs._cuda_isCurrentStreamCapturing = driver.is_capturing  # imported before torch._C was filled in
    cuda.default_generators = tuple(driver.generator(index) for index in range(len(properties)))
    cuda._check_cubins = cuda._check_capability = _nothing
    torch.backends.cudnn.is_acceptable = lambda tensor: False  # it would warn at every LSTM
    cuda._queued_calls.clear()


def _fill_in_storages(driver: ModuleType) -> None:
    """torch's own go through functions of the CUDA library."""
    to_before, resize_before = torch.UntypedStorage.to, torch.UntypedStorage.resize_

    def to(
        self: torch.UntypedStorage, *, device: torch.types.Device, non_blocking: bool = False
    ) -> torch.UntypedStorage:  # torch.load with its map_location
        target = torch.device(device)  # type: ignore[arg-type]
        if target.type != "cuda" or self.device == target:
            return to_before(self, device=target, non_blocking=non_blocking)
        as_tensor = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self)
        return as_tensor.to(target).untyped_storage()

    def resize_(self: torch.UntypedStorage, size: int) -> Any:  # FSDP
        return driver.resize_storage(self, size) if self.device.type == "cuda" else resize_before(self, size)

    torch.UntypedStorage.to = to  # type: ignore[method-assign]
    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]


def _fill_in_parallel() -> None:
    """Adds the copies between cards of torch.nn.DataParallel. Each is queued on the streams of its two cards."""

    def sent(tensor: torch.Tensor, card: int) -> torch.Tensor:
        return tensor.to(torch.device("cuda", card), non_blocking=True)

    def broadcast_coalesced(tensors: Sequence[torch.Tensor], cards: list[int], buffer_size: int) -> Any:
        return [[sent(tensor, card) for tensor in tensors] for card in cards]

    def scatter(
        tensor: torch.Tensor, cards: list[int], sizes: list[int] | None, dim: int, streams: Sequence[Any] | None
    ) -> list[torch.Tensor]:
        chunks = tensor.chunk(len(cards), dim) if sizes is None else tensor.split(sizes, dim)
        found = []
        for number, chunk in enumerate(chunks):
            with nullcontext() if streams is None else streams[number]:
                found.append(sent(chunk.contiguous(), cards[number]))
        return found

    def gather(tensors: Sequence[torch.Tensor], dim: int, card: int | None) -> torch.Tensor:
        target = torch.cuda.current_device() if card is None else card
        return torch.cat([tensor.cpu() if target == -1 else sent(tensor, target) for tensor in tensors], dim)

    for name, function in {"broadcast_coalesced": broadcast_coalesced, "scatter": scatter, "gather": gather}.items():
        setattr(torch._C, f"_{name}", function)
    torch.cuda.nccl.is_available = lambda tensors: False  # type: ignore[assignment]  # gradients are summed by copies


def _checked(card: int, num_cards: int) -> int:
    if not 0 <= card < num_cards:
        raise AssertionError("Invalid device id")  # torch's words
    return card


def _nothing(*arguments: object, **options: object) -> None:
    pass
