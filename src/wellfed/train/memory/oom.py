"""Recognises memory errors, by type or else by text; frees the memory that they leave; limits memory to a budget."""

from __future__ import annotations

import errno
import gc
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

from wellfed.errors import first_line

Kind = Literal["device_oom", "host_oom"]
Result = TypeVar("Result")
_DEVICE_TEXTS = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "HIP out of memory",
    "HIP error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUFFT_ALLOC_FAILED",
    "CUDA error: insufficient resources when calling `cusparse",
)
# NCCL's last line is: Cuda failure 2 'out of memory' (https://github.com/NVIDIA/nccl, checks.h). Before 2.18 it has no
# number.
_NCCL_TEXT = re.compile(r"Cuda failure (\d+ )?'out of memory'")
_HOST_TEXTS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "unable to mmap memory: you tried to mmap",
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "Error while creating shared memory segment /dev/shm/nccl-",
)
_HOST_TEXT_ALONE = "std::bad_alloc"
"""Complete text if a C++ library of torch has no memory."""

# "DataLoader worker process 0" is left out: it reports an error of the data's own code.
_WORKER_LOST = re.compile(
    r"^.*(DataLoader worker \(pid|Unexpected bus error encountered in worker|unable to open shared memory|"
    r"unable to (mmap .* from|write to|resize|allocate shared memory\(shm\) for) file </torch_).*$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class MemoryFailure:
    """Facts of a memory error. It has no traceback, which would keep the tensors of the failed step."""

    kind: Kind
    message: str


def classify(error: BaseException) -> MemoryFailure | None:
    """Returns the memory failure that an exception reports; None if it reports something else."""
    if lost_worker(error) is not None:
        return None
    text = str(error)
    kind: Kind | None = None
    if isinstance(error, torch.OutOfMemoryError):
        kind = "device_oom"
    elif isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        kind = "host_oom"
    elif isinstance(error, RuntimeError):
        if any(part in text for part in _DEVICE_TEXTS) or _NCCL_TEXT.search(text):
            kind = "device_oom"
        elif any(part in text for part in _HOST_TEXTS) or text.strip() == _HOST_TEXT_ALONE:
            kind = "host_oom"
    return None if kind is None else MemoryFailure(kind, first_line(error))


def lost_worker(error: BaseException) -> str | None:
    """Returns torch's message about a worker that was killed or had no space in /dev/shm; None for other errors.
    Usually the host is out of memory, so a smaller step would not help."""
    found = _WORKER_LOST.search(str(error)) if isinstance(error, RuntimeError) else None
    return None if found is None else found.group().strip()


def attempt(work: Callable[..., Result], *arguments: Any) -> tuple[Result | None, MemoryFailure | None]:
    """Returns the result of ``work(*arguments)``, or its memory failure. Other errors are raised.

    The error itself is gone then, with its references to the tensors of the work.
    """
    try:
        return work(*arguments), None
    except Exception as error:
        failure = classify(error)
        if failure is None:
            raise
        return None, failure


def release() -> None:
    """Returns unreferenced memory to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def cap_cuda(budget_bytes: int, device: int = 0) -> None:
    """Makes allocations beyond the budget fail, as on a card of that size.

    Limits what torch's allocator reserves, not CUDA's context or NCCL.
    """
    total = torch.cuda.mem_get_info(device)[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, budget_bytes / total), device)
