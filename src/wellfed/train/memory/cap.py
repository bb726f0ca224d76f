"""Limits this process to a memory budget on a larger card."""

from __future__ import annotations

import torch


def cap_cuda(budget_bytes: int, device: int = 0) -> None:
    """Makes allocations beyond the budget fail, as on a card of that size.

    Limits what torch's allocator reserves, not CUDA's context or NCCL.
    """
    total = torch.cuda.mem_get_info(device)[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, budget_bytes / total), device)
