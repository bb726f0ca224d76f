"""Watches GPUs and host outside of a run of wellfed: for the monitor, and for people's own training loops.

Knows telemetry, NVML and how a curve is judged; knows nothing of plans, configurations or Lightning.
Start from `monitor.Monitor`; for a loop of your own: ``from wellfed import GPUWatch``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wellfed.watch.gpu_watch import GPUWatch

__all__ = ["GPUWatch"]


def __getattr__(name: str) -> Any:
    """Imported when it is asked for: the monitor needs none of it."""
    if name == "GPUWatch":
        from wellfed.watch.gpu_watch import GPUWatch

        return GPUWatch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
