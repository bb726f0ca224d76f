"""Limits this process to a memory budget, on a larger card or on the host."""

from __future__ import annotations

import psutil
import torch


def cap_cuda(budget_bytes: int, *, ballast: bool, device: int = 0) -> torch.Tensor | None:
    """Makes allocations beyond the budget fail, as on a card of that size. Returns the ballast, which must be kept.

    Limits what torch's allocator reserves, not CUDA's context or NCCL.

    Args:
        ballast: fill the rest of the card for libraries that query its free memory, such as cuDNN when it picks
            algorithms.
    """
    free, total = torch.cuda.mem_get_info(device)
    extra = max(0, free - budget_bytes) if ballast else 0
    torch.cuda.set_per_process_memory_fraction(min(1.0, (budget_bytes + extra) / total), device)
    return torch.empty(extra, dtype=torch.uint8, device=f"cuda:{device}") if extra else None


def cap_host(budget_bytes: int) -> int | None:
    """Makes host allocations beyond the budget fail as out of memory; returns the limit in bytes.

    The limit is the current memory plus the budget. It counts private memory (RLIMIT_DATA, getrlimit(2)), and worker
    processes inherit it. Returns None where the system has no such limit, or has a lower one.
    """
    held: int | None = getattr(psutil.Process().memory_info(), "data", None)  # on Linux
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
