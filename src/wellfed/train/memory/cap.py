"""Holds this process to a budget: a larger card's allocator, or the host's memory in its place."""

from __future__ import annotations

from pathlib import Path

import torch


def cap_cuda(budget_bytes: int, *, ballast: bool, device: int = 0) -> torch.Tensor | None:
    """An allocation that would go beyond the budget fails, as on a card of that size; the ballast, to be kept.

    The limit is on what torch's allocator reserves, not on CUDA's context or NCCL.

    Args:
        ballast: fill the rest of the card, so that libraries that ask the driver how much is free (cuDNN picks its
            algorithms by that) see the smaller card too.
    """
    free, total = torch.cuda.mem_get_info(device)
    extra = max(0, free - budget_bytes) if ballast else 0
    torch.cuda.set_per_process_memory_fraction(min(1.0, (budget_bytes + extra) / total), device)
    return torch.empty(extra, dtype=torch.uint8, device=f"cuda:{device}") if extra else None


def cap_host(budget_bytes: int) -> int | None:
    """A host allocation beyond what is held now and the budget fails in torch as out of memory; the limit, bytes.

    Counts private memory as the kernel does (RLIMIT_DATA, getrlimit(2)); worker processes inherit it. None where the
    system has no such limit, or a lower one is set already.
    """
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    held = next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmData:")), None)
    if held is None:
        return None
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = held + budget_bytes
    lowest = min((each for each in (soft, hard) if each != resource.RLIM_INFINITY), default=limit)
    if lowest < limit:
        return None
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    return limit
