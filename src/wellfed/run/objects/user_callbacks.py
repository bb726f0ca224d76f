"""Builds the callbacks that the configuration names, and checks them before training."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

from wellfed.config.build import build
from wellfed.config.faults.target_faults import TARGET
from wellfed.config.schema import RunConfig, Strategy
from wellfed.contract import Datasets
from wellfed.errors import ConfigError, Fault, type_and_line
from wellfed.run.objects.evaluation import named_best
from wellfed.run.objects.optimizers import try_schedule
from wellfed.run.objects.run_objects import RunObjects

_LIGHTNINGS = ("lightning.pytorch.callbacks", "pytorch_lightning.callbacks")
_OURS = {
    "EarlyStopping": "EarlyStopping",
    "EMAWeightAveraging": "Ema",
    "LearningRateMonitor": "LrMonitor",
}
"""Callbacks of Lightning's -> ours in `wellfed.train.loop.callbacks`."""


def make_callbacks(config: RunConfig, objects: RunObjects) -> dict[str, Any]:
    """Returns the callbacks by name, in order. Errors that they raise later name the callback.

    Raises:
        ConfigError: a callback or the scheduler can't be made, or monitors validation, and there is none.
    """
    _check_monitor("workload.schedule.monitor", config.workload.schedule.monitor, objects.data)
    if not objects.brings_step:
        try_schedule(config, objects.model)
    named: Mapping[str, Any] = {name: node for name, node in (config.callbacks or {}).items() if node is not None}
    if named and objects.guest is None and config.trainer.strategy is not Strategy.fsdp:
        named = own_nodes(named) or named
    made = {}
    for name, node in named.items():
        where = f"callbacks.{name}"
        try:
            made[name] = callback = build(node, where)
        except ConfigError:
            raise
        except Exception as error:  # of the user's constructor, or of Lightning
            problem = f"{(config.callbacks or {})[name][TARGET]} refuses its arguments: {type_and_line(error)}."
            raise ConfigError.of(where, problem, f"Change {where}.*") from error
        if (wrong := _fault_of(callback, config.trainer.strategy.value)) is not None:
            raise ConfigError.of(where, *wrong)
        _check_monitor(f"{where}.monitor", getattr(callback, "monitor", None), objects.data)
    return made


def own_nodes(named: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the configured callbacks of Lightning's as our own for plain models, with the same arguments.

    None if any is another class or has an argument that ours lacks: Lightning then trains the model.
    """
    from wellfed.train.loop import callbacks as ours

    found = {}
    for name, node in named.items():
        package, _, kind = str(node.get(TARGET)).rpartition(".")
        target = f"{ours.__name__}.{_OURS.get(kind)}" if package.startswith(_LIGHTNINGS) else f"{package}.{kind}"
        own: Any = None
        with suppress(Exception):  # building it reports what is wrong
            own = getattr(import_module(target.rpartition(".")[0]), target.rpartition(".")[2])
        is_own = isinstance(own, type) and issubclass(own, ours.Callback)
        if not is_own or not {*node} - {TARGET} <= inspect.signature(own).parameters.keys():
            return None
        found[name] = {**node, TARGET: target}
    return found


def _fault_of(callback: Any, strategy: str) -> tuple[str, str] | None:
    """Returns problem and advice for an object that can't be a callback; None if it can."""
    from wellfed.train.loop.callbacks import Callback

    if isinstance(callback, Callback):
        return None
    from wellfed.train.guest.users import fault_of_callback  # imports Lightning

    return fault_of_callback(callback, strategy)


def check_metrics(config: RunConfig, objects: RunObjects, metrics: Mapping[str, float]) -> None:
    """Raises a ConfigError if a metric of validation that is monitored, or picks the best, does not exist."""
    asked = {f"callbacks.{name}.monitor": getattr(one, "monitor", None) for name, one in objects.callbacks.items()}
    asked["workload.schedule.monitor"] = config.workload.schedule.monitor
    asked = {where: name for where, name in asked.items() if isinstance(name, str) and name.startswith("val/")}
    asked["trainer.best_metric"] = named_best(config, objects)
    faults = []
    for where, asked_name in asked.items():
        names = sorted(metrics) if where == "trainer.best_metric" else [f"val/{name}" for name in sorted(metrics)]
        if asked_name is not None and asked_name not in names:
            way_out = f"Set it to one of {', '.join(names)}."
            faults.append(Fault(f"{where}={asked_name}", "validation gives no such metric.", way_out))
    if faults:
        raise ConfigError(faults)


def _check_monitor(where: str, monitor: Any, data: Datasets) -> None:
    """Raises a ConfigError for a metric of validation if there is no val split."""
    if isinstance(monitor, str) and monitor.startswith(("val/", "val_")) and data.val is None:
        raise ConfigError.of(f"{where}={monitor}", "the workload has no val split.", f"Set {where}=train/loss.")
