"""Recognises errors of memory, by type where torch gives one, else by text, and frees what they leave."""

from __future__ import annotations

import errno
import gc
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

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
# NCCL's last line: Cuda failure 2 'out of memory' (https://github.com/NVIDIA/nccl, checks.h; without the number before
# 2.18).
_NCCL_TEXT = re.compile(r"Cuda failure (\d+ )?'out of memory'")
_HOST_TEXTS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "unable to mmap memory: you tried to mmap",
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "Error while creating shared memory segment /dev/shm/nccl-",
)
_HOST_TEXT_ALONE = "std::bad_alloc"
"""All that torch says where a C++ library of its own has no memory."""

# What libraries say for want of memory, and for other reasons: cuBLAS and cuSOLVER where a handle finds no room
# (https://github.com/EleutherAI/lm-evaluation-harness/issues/1689), cuDNN where it loads its kernels
# (https://github.com/pytorch/pytorch/issues/81620), or where no algorithm's workspace fits.
_SUSPECT = re.compile(
    r"CUBLAS_STATUS_(NOT_INITIALIZED|EXECUTION_FAILED|INTERNAL_ERROR)\b|"
    r"CUDNN_STATUS_(NOT_INITIALIZED|INTERNAL_ERROR|EXECUTION_FAILED)\b|"
    r"CUSOLVER_STATUS_(NOT_INITIALIZED|INTERNAL_ERROR)\b|CUFFT_INTERNAL_ERROR\b|"
    r"unable to find an engine to execute this computation"
)

# "DataLoader worker process 0" is another: an error of the data's own code that was caught there.
_WORKER_LOST = re.compile(
    r"^.*(DataLoader worker \(pid|Unexpected bus error encountered in worker|unable to open shared memory|"
    r"unable to (mmap .* from|write to|resize|allocate shared memory\(shm\) for) file </torch_).*$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class MemoryFailure:
    """What is kept of a memory error: no traceback, which would pin the tensors of the failed step."""

    kind: Kind
    message: str
    is_suspect: bool = False
    """The same text has other causes, too."""


def classify(error: BaseException, *, takes_suspects: bool = False) -> MemoryFailure | None:
    """The memory failure an exception means, or None if it is something else, or merely may be one.

    Args:
        takes_suspects: what may be one is taken for one.
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
    """How torch says that a worker process was killed, or found no room in /dev/shm; None where it says something else.

    That is for want of the host's memory mostly, and nothing that a step could do in less of it.
    """
    found = _WORKER_LOST.search(str(error)) if isinstance(error, RuntimeError) else None
    return None if found is None else found.group().strip()


class Attempts:
    """Tries one thing again and again: gives the result, or the memory failure in its place; other errors are raised.

    What may be a failure of memory is taken for one, unless the attempt before ended in such a one, too: then less
    memory has not helped, and it is raised as what it is.
    """

    def __init__(self) -> None:
        self._takes_suspects = True

    def __call__(self, work: Callable[[], Result]) -> tuple[Result | None, MemoryFailure | None]:
        """One attempt."""
        failure = None
        try:
            result = work()
        except Exception as error:
            result, failure = None, classify(error, takes_suspects=self._takes_suspects)
            if failure is None:
                raise
        self._takes_suspects = failure is None or not failure.is_suspect
        return result, failure


def release() -> None:
    """Memory that nothing refers to goes back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def reserved_bytes() -> int:
    """What torch's allocator holds of the current card; 0 without one."""
    return torch.cuda.memory_reserved() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
