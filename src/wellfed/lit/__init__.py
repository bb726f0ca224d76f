"""Opens the only door to Lightning: its loop around our training step, and what we hang on its hooks.

Knows models, loaders, memory and the journal; knows nothing of Hydra, wandb or the command line.
Start from `trainer.fit` (one run) and `module.StepModule` (a plain model within it).
For a Trainer of your own: ``from wellfed import GPUCurves``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wellfed.lit.gpu_curves import GPUCurves

__all__ = ["GPUCurves"]


def __getattr__(name: str) -> Any:
    """Imported when it is asked for, behind whichever Lightning the user has imported."""
    if name == "GPUCurves":
        from wellfed.lit.gpu_curves import GPUCurves

        return GPUCurves
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
