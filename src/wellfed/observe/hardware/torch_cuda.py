"""Lists the GPUs that torch can use. Imports torch only when called; no other file of the folder does."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass

from wellfed.errors import first_line
from wellfed.observe.machine_facts import GpuFacts
from wellfed.units import gib

IMPORT_FAILED = "torch can't be imported"
"""Start of ``TorchCuda.problem`` if torch is missing."""


@dataclass(frozen=True)
class TorchCuda:
    """GPUs that torch can use on this machine."""

    devices: tuple[GpuFacts, ...] = ()
    """In torch's order, with what torch knows of them: UUID without ``GPU-``, name, memory, capability."""
    problem: str | None = None
    """Reason for no devices, without a full stop, for use inside other messages."""
    cuda: str | None = None
    """Platform that torch was built for: ``CUDA 12.8`` or ``ROCm 6.4``."""
    notes: tuple[str, ...] = ()
    """torch's warnings while listing, e.g. a card without kernels in this build."""


def torch_cuda() -> TorchCuda:
    """Returns torch's devices. Imports torch (seconds) and initialises CUDA: never call it before a fork."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a CUDA library that torch links is missing
        return TorchCuda(problem=f"{IMPORT_FAILED} ({first_line(error).rstrip('. ')})")
    built_for = (
        f"ROCm {torch.version.hip}" if torch.version.hip else torch.version.cuda and f"CUDA {torch.version.cuda}"
    )
    if built_for is None:
        return TorchCuda(problem=f"torch {torch.__version__} is built without CUDA")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            properties = [torch.cuda.get_device_properties(index) for index in range(count)]
        except (RuntimeError, AssertionError) as error:
            return TorchCuda(problem=first_line(error).rstrip(". "), cuda=built_for)
    notes = tuple(dict.fromkeys(first_line(warning.message).rstrip(". ") for warning in caught))
    if not properties:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        shown = "" if visible is None else f" with CUDA_VISIBLE_DEVICES={visible}"
        reason = notes[0] if notes else f"torch {torch.__version__} ({built_for}) finds no usable GPU{shown}"
        return TorchCuda(problem=reason, cuda=built_for)
    devices = tuple(
        GpuFacts(
            index,
            uuid=None if (uuid := getattr(each, "uuid", None)) is None else str(uuid),
            name=each.name,
            memory_gib=gib(each.total_memory),
            capability=f"{each.major}.{each.minor}",
        )
        for index, each in enumerate(properties)
    )
    return TorchCuda(devices, cuda=built_for, notes=notes)
