"""Recognises memory errors, by type or else by text; frees the memory that they leave; limits memory to a budget."""

from __future__ import annotations

import errno
import gc
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

from wellfed.errors import first_line

_LOG = logging.getLogger(__name__)
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

# Texts of memory errors that may have other causes. cuBLAS and cuSOLVER: no memory for a handle
# (https://github.com/EleutherAI/lm-evaluation-harness/issues/1689). cuDNN: none for its kernels
# (https://github.com/pytorch/pytorch/issues/81620) or a workspace.
_SUSPECT = re.compile(
    r"CUBLAS_STATUS_(NOT_INITIALIZED|EXECUTION_FAILED|INTERNAL_ERROR)\b|"
    r"CUDNN_STATUS_(NOT_INITIALIZED|INTERNAL_ERROR|EXECUTION_FAILED)\b|"
    r"CUSOLVER_STATUS_(NOT_INITIALIZED|INTERNAL_ERROR)\b|CUFFT_INTERNAL_ERROR\b|"
    r"unable to find an engine to execute this computation"
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
    is_suspect: bool = False
    """The text may have other causes."""


def classify(error: BaseException, *, takes_suspects: bool = False) -> MemoryFailure | None:
    """Returns the memory failure that an exception reports; None if it reports something else.

    Args:
        takes_suspects: an error that may have other causes counts as a memory failure.
    """
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
        elif takes_suspects and _SUSPECT.search(text):
            return MemoryFailure("device_oom", first_line(error), is_suspect=True)
    return None if kind is None else MemoryFailure(kind, first_line(error))


def lost_worker(error: BaseException) -> str | None:
    """Returns torch's message about a worker that was killed or had no space in /dev/shm; None for other errors.
    Usually the host is out of memory, so a smaller step would not help."""
    found = _WORKER_LOST.search(str(error)) if isinstance(error, RuntimeError) else None
    return None if found is None else found.group().strip()


class Attempts:
    """Successive attempts at one thing. Each returns a result or a memory failure; other errors are raised.

    An error that may have other causes counts as a memory failure once. If the next attempt fails the same way, less
    memory has not helped, and the error is raised.
    """

    def __init__(self) -> None:
        self._takes_suspects = True

    def __call__(self, work: Callable[..., Result], *arguments: Any) -> tuple[Result | None, MemoryFailure | None]:
        """Returns the result of one attempt, ``work(*arguments)``, or its memory failure."""
        failure = None
        try:
            result = work(*arguments)
        except Exception as error:
            result, failure = None, classify(error, takes_suspects=self._takes_suspects)
            if failure is None:
                raise
            if failure.is_suspect:
                _LOG.info("this may be a lack of memory, so less is tried", exc_info=True)
        self._takes_suspects = failure is None or not failure.is_suspect
        return result, failure


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
