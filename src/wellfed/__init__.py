"""Plans a training run with reasons, watches it, and reports where each millisecond went.

Exports the public names (docs/public_names.md). Each is imported when it is first used, so ``import wellfed`` loads
neither torch nor Lightning. For the engine itself start from ``wellfed.cli.commands`` and ``docs/architecture.md``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wellfed.cli.main import main as main
    from wellfed.contract import Datasets as Datasets
    from wellfed.contract import Evaluation as Evaluation
    from wellfed.contract import FeatureModeName as FeatureModeName
    from wellfed.contract import Features as Features
    from wellfed.contract import FeatureSource as FeatureSource
    from wellfed.contract import LossOutput as LossOutput
    from wellfed.contract import TrainData as TrainData
    from wellfed.data.prepared import check_file as check_file
    from wellfed.data.prepared import prepared as prepared
    from wellfed.errors import ConfigError as ConfigError
    from wellfed.errors import DataError as DataError
    from wellfed.errors import Fault as Fault
    from wellfed.errors import WellfedError as WellfedError
    from wellfed.errors import first_line as first_line
    from wellfed.observe.loggers.log_media import log_image as log_image
    from wellfed.observe.loggers.log_media import log_table as log_table
    from wellfed.plan.predict.size_fit import find_micro_batch as find_micro_batch
    from wellfed.record.entries import RunRecord as RunRecord
    from wellfed.run.objects.load_model import load_model as load_model
    from wellfed.sample_rng import SampleRng as SampleRng
    from wellfed.sample_rng import seed_from as seed_from
    from wellfed.train.hugging_face import TransformersModel as TransformersModel
    from wellfed.train.hugging_face import from_transformers as from_transformers
    from wellfed.watch.gpu_curves import GPUCurves as GPUCurves
    from wellfed.watch.gpu_watch import GPUWatch as GPUWatch
    from wellfed.watch.watched_script import Watch as Watch

__version__ = "0.1.0"

_NAMES = {
    "cli.main": "main",
    "contract": "Datasets Evaluation FeatureModeName FeatureSource Features LossOutput TrainData",
    "data.prepared": "check_file prepared",
    "errors": "ConfigError DataError Fault WellfedError first_line",
    "watch.gpu_curves": "GPUCurves",
    "watch.gpu_watch": "GPUWatch",
    "observe.loggers.log_media": "log_image log_table",
    "plan.predict.size_fit": "find_micro_batch",
    "record.entries": "RunRecord",
    "run.objects.load_model": "load_model",
    "watch.watched_script": "Watch",
    "sample_rng": "SampleRng seed_from",
    "train.hugging_face": "TransformersModel from_transformers",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}
"""Public name -> the submodule that defines it."""

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used."""
    if name in ("TrainerWatch", "AccelerateWatch", "RayTrainWatch"):
        raise ImportError(f"{name} went in 0.1: write `with wellfed.Watch():` around the training.")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
