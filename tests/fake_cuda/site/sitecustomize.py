"""Loads the simulated cards around ``import torch`` in every Python of this environment, child processes too.

Python imports a module of this name at its start where this folder is on PYTHONPATH. FAKE_CUDA_DEVICES says how many
cards there are; without it nothing happens.
"""

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class _AroundTorch:
    """Finds torch as Python does, and does something before and after it is loaded."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            import fake_cuda

            fake_cuda.preload()
            load(module)
            if os.environ.get("FAKE_CUDA_LATER") != "1":
                fake_cuda.install()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if int(os.environ.get("FAKE_CUDA_DEVICES", "0")):
    sys.meta_path.insert(0, _AroundTorch)  # type: ignore[arg-type]
