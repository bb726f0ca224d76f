"""Makes the callbacks that the configuration names, and tells before training what is wrong with them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from wellfed.config.build import TARGET, build
from wellfed.config.schema import RunConfig
from wellfed.contract import Datasets
from wellfed.errors import ConfigError, Fault, type_and_line
from wellfed.run.objects.assemble import Parts, try_schedule


def make_callbacks(config: RunConfig, parts: Parts) -> dict[str, Any]:
    """By their names, in their order; what they raise later says which of them it was.

    Raises:
        ConfigError: one of them, or the scheduler, can't be made, or waits for a figure that nobody can log.
    """
    faults = list(_monitor_faults("workload.schedule.monitor", config.workload.schedule.monitor, parts.data))
    if faults:
        raise ConfigError(faults)
    try_schedule(config, parts)
    named: Mapping[str, Any] = {name: node for name, node in (config.callbacks or {}).items() if node is not None}
    if not named:
        return {}
    from wellfed.train.lightning.callbacks.users import fault_of_callback, name_errors  # Lightning, for who asks for it

    made = {}
    for name, node in named.items():
        where = f"callbacks.{name}"
        try:
            made[name] = callback = build(node, where)
        except ConfigError as error:
            faults += error.faults
            continue
        except Exception as error:  # noqa: BLE001  the user's constructor, or an error of Lightning's own
            problem = f"{node[TARGET]} refuses its arguments: {type_and_line(error)}."
            faults.append(Fault(where, problem, f"Change {where}.*"))
            continue
        wrong = fault_of_callback(callback, config.trainer.strategy.value)
        if wrong is not None:
            faults.append(Fault(where, *wrong))
        else:
            faults += _monitor_faults(f"{where}.monitor", getattr(callback, "monitor", None), parts.data)
            name_errors(callback, where)
    if faults:
        raise ConfigError(faults)
    return made


def check_monitors(config: RunConfig, parts: Parts, names: Collection[str]) -> None:
    """Raise a ConfigError for each figure of validation that is waited for and is not among these."""
    waited = {f"callbacks.{name}.monitor": getattr(one, "monitor", None) for name, one in parts.callbacks.items()}
    waited["workload.schedule.monitor"] = config.workload.schedule.monitor
    faults = [
        Fault(f"{where}={monitor}", "validation gives no such figure.", f"Set it to one of {', '.join(sorted(names))}.")
        for where, monitor in waited.items()
        if isinstance(monitor, str) and monitor.startswith("val/") and monitor not in names
    ]
    if faults:
        raise ConfigError(faults)


def _monitor_faults(where: str, monitor: Any, data: Datasets) -> Iterator[Fault]:
    """A figure that can't be there; which a workload logs is known when it has."""
    if isinstance(monitor, str) and monitor.startswith(("val/", "val_")) and data.val is None:
        yield Fault(f"{where}={monitor}", "the workload has no val split.", f"Set {where}=train/loss.")
