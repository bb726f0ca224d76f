"""Builds the callbacks that the configuration names, and checks them before training."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from wellfed.config.build import TARGET, build
from wellfed.config.schema import RunConfig
from wellfed.errors import ConfigError, Fault, type_and_line
from wellfed.run.objects.evaluation import named_best
from wellfed.run.objects.optimizers import try_schedule
from wellfed.run.objects.run_objects import RunObjects

_LOG = logging.getLogger(__name__)


def make_callbacks(config: RunConfig, objects: RunObjects) -> dict[str, Any]:
    """Returns the callbacks by name, in order. Errors that they raise later name the callback.

    Raises:
        ConfigError: a callback or the scheduler can't be made.
    """
    faults = list[Fault]()
    if not objects.is_lightning_module:
        try_schedule(config, objects.model)
    named: Mapping[str, Any] = {name: node for name, node in (config.callbacks or {}).items() if node is not None}
    if not named:
        return {}
    from wellfed.train.lightning.callbacks.users import fault_of_callback, name_errors  # imports Lightning

    made = {}
    for name, node in named.items():
        where = f"callbacks.{name}"
        try:
            made[name] = callback = build(node, where)
        except ConfigError as error:
            faults += error.faults
            continue
        except Exception as error:  # noqa: BLE001  of the user's constructor, or of Lightning
            problem = f"{node[TARGET]} refuses its arguments: {type_and_line(error)}."
            faults.append(Fault(where, problem, f"Change {where}.*"))
            continue
        wrong = fault_of_callback(callback, config.trainer.strategy.value)
        if wrong is not None:
            faults.append(Fault(where, *wrong))
        else:
            name_errors(callback, where)
    if faults:
        raise ConfigError(faults)
    return made


def check_metrics(config: RunConfig, objects: RunObjects, split: str, metrics: Mapping[str, float]) -> None:
    """Raises a ConfigError if a metric of validation that is monitored, or picks the best, does not exist.

    For a LightningModule it is a warning, since the module may log less before training.
    """
    if split != "val" or (objects.is_lightning_module and not metrics):
        return
    names, best = {f"val/{name}" for name in metrics}, named_best(config, objects)
    waited = {f"callbacks.{name}.monitor": getattr(one, "monitor", None) for name, one in objects.callbacks.items()}
    waited["workload.schedule.monitor"] = config.workload.schedule.monitor
    faults = [
        Fault(f"{where}={monitor}", "validation gives no such figure.", f"Set it to one of {', '.join(sorted(names))}.")
        for where, monitor in waited.items()
        if isinstance(monitor, str) and monitor.startswith("val/") and monitor not in names
    ]
    if best is not None and best not in metrics:
        bare = best.removeprefix("val/").removeprefix("val_")
        listed = f"Set trainer.best_metric to one of {', '.join(metrics)}; null leaves it to the workload."
        way_out = f"Set trainer.best_metric={bare}." if bare in metrics else listed
        faults.append(Fault(f"trainer.best_metric={best}", "validation gives no such metric.", way_out))
    if not objects.is_lightning_module and faults:
        raise ConfigError(faults)
    for fault in faults:
        _LOG.warning("The batches of validation that are tried before training: %s", fault)
