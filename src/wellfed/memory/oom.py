"""Recognises out-of-memory errors, by type where torch gives one, else by text, and frees what they leave."""

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
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
)
# NCCL's last line: Cuda failure 2 'out of memory' (https://github.com/NVIDIA/nccl, checks.h; without the number before
# 2.18).
_NCCL_TEXT = re.compile(r"Cuda failure (\d+ )?'out of memory'")
_HOST_TEXTS = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")


@dataclass(frozen=True)
class MemoryFailure:
    """What is kept of a memory error: no traceback, which would pin the tensors of the failed step."""

    kind: Kind
    message: str


def classify(error: BaseException) -> MemoryFailure | None:
    """The memory failure an exception means, or None if it is something else."""
    text = str(error)
    kind: Kind | None = None
    if isinstance(error, torch.OutOfMemoryError):
        kind = "device_oom"
    elif isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        kind = "host_oom"
    elif isinstance(error, RuntimeError):
        if any(part in text for part in _DEVICE_TEXTS) or _NCCL_TEXT.search(text):
            kind = "device_oom"
        elif any(part in text for part in _HOST_TEXTS):
            kind = "host_oom"
    return None if kind is None else MemoryFailure(kind, first_line(error))


def attempted(work: Callable[[], Result]) -> tuple[Result | None, MemoryFailure | None]:
    """The result, or the memory failure in its place; other errors are raised."""
    try:
        return work(), None
    except Exception as error:
        failure = classify(error)
        if failure is None:
            raise
    return None, failure


def release() -> None:
    """Memory that nothing refers to goes back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
