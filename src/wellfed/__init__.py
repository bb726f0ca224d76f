"""Plans a training run with reasons, watches it, and reports where each millisecond went.

Exports the public names (docs/public_names.md). Each is imported when it is first used, so ``import wellfed`` loads
neither torch nor Lightning. For the engine itself start from ``wellfed.commands`` and ``docs/architecture.md``.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wellfed.commands.cli import main as main
    from wellfed.contract import Datasets as Datasets
    from wellfed.contract import Evaluation as Evaluation
    from wellfed.contract import FeatureModeName as FeatureModeName
    from wellfed.contract import Features as Features
    from wellfed.contract import FeatureSource as FeatureSource
    from wellfed.contract import LossOutput as LossOutput
    from wellfed.contract import TrainData as TrainData
    from wellfed.errors import ConfigError as ConfigError
    from wellfed.errors import DataError as DataError
    from wellfed.errors import Fault as Fault
    from wellfed.errors import WellfedError as WellfedError
    from wellfed.errors import first_line as first_line
    from wellfed.footprint.size_fit import find_micro_batch as find_micro_batch
    from wellfed.hugging_face import TransformersModel as TransformersModel
    from wellfed.hugging_face import from_transformers as from_transformers
    from wellfed.inference import load_model as load_model
    from wellfed.lit.gpu_curves import GPUCurves as GPUCurves
    from wellfed.prepared import check_file as check_file
    from wellfed.prepared import prepared as prepared
    from wellfed.record import RunRecord as RunRecord
    from wellfed.sample_rng import SampleRng as SampleRng
    from wellfed.sample_rng import seed_from as seed_from
    from wellfed.watch.gpu_watch import GPUWatch as GPUWatch

__version__ = "0.1.0"

_HOMES = {
    "ConfigError": "errors",
    "DataError": "errors",
    "Datasets": "contract",
    "Evaluation": "contract",
    "Fault": "errors",
    "FeatureModeName": "contract",
    "FeatureSource": "contract",
    "Features": "contract",
    "GPUCurves": "lit.gpu_curves",
    "GPUWatch": "watch.gpu_watch",
    "LossOutput": "contract",
    "RunRecord": "record",
    "SampleRng": "sample_rng",
    "TrainData": "contract",
    "TransformersModel": "hugging_face",
    "WellfedError": "errors",
    "check_file": "prepared",
    "find_micro_batch": "footprint.size_fit",
    "first_line": "errors",
    "from_transformers": "hugging_face",
    "load_model": "inference",
    "main": "commands.cli",
    "prepared": "prepared",
    "seed_from": "sample_rng",
}
"""Public name -> the submodule that defines it."""

__all__ = list(_HOMES)

if not TYPE_CHECKING:  # mypy would accept any name

    def __getattr__(name: str) -> Any:
        """Imports a public name when it is first used."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps `prepared` the function: importing the submodule of that name would replace it."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
