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
_DEVICE_TEXT = re.compile(
    r"(CUDA|HIP)( driver)?( error:)? out of memory|Cuda failure (\d+ )?'out of memory'|"  # the latter by NCCL
    r"STATUS_ALLOC_FAILED|CUFFT_ALLOC_FAILED|CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED|"
    r"CUDA error: insufficient resources when calling `cusparse"
)
_HOST_TEXT = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|unable to mmap memory: you tried to mmap|"
    r"CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED|Error while creating shared memory segment /dev/shm/nccl-|"
    r"^\s*std::bad_alloc\s*$"  # the whole text, if a C++ library of torch has no memory
)
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
    text = str(error) if isinstance(error, RuntimeError) else ""
    kind: Kind
    if isinstance(error, torch.OutOfMemoryError) or _DEVICE_TEXT.search(text):
        kind = "device_oom"
    elif isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM or _HOST_TEXT.search(text):
        kind = "host_oom"
    else:
        return None
    return MemoryFailure(kind, first_line(error))


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
