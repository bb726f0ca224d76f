"""Builds the optimizer and the learning-rate scheduler of a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from wellfed.config.build import build
from wellfed.config.schema import RunConfig
from wellfed.errors import ConfigError
from wellfed.plan.run_plan import RunPlan
from wellfed.train.plain_model.scheduling import Scheduling
from wellfed.train.step.train_step import parameter_groups

_LOG = logging.getLogger(__name__)
_USUAL_STATES = 2
"""Tensors of a parameter's size that Adam keeps for it."""


def make_optimizer(
    config: RunConfig, plan: RunPlan, groups: list[dict[str, Any]], *, sparse: bool = False, has_listeners: bool = False
) -> torch.optim.Optimizer:
    """Returns the workload's optimizer, fused if torch supports it.

    Args:
        sparse: a parameter has sparse gradients, which fused optimizers refuse in their first step.
        has_listeners: a callback reads the gradients before the step.
    """
    node = dict(config.workload.optimizer)

    def made(**more: Any) -> torch.optim.Optimizer:
        return build({**node, **more}, "workload.optimizer", [dict(group) for group in groups])  # type: ignore[no-any-return]

    plain: torch.optim.Optimizer = made()
    is_decided = "fused" not in plain.defaults or "fused" in node or node.get("foreach") or node.get("capturable")
    is_dense_real = not sparse and all(weight.is_floating_point() for group in groups for weight in group["params"])
    # Lightning refuses a fused optimizer if it must unscale gradients itself to clip them.
    unscales = plan.device.precision == "16-mixed" and (has_listeners or config.trainer.gradient_clip is not None)
    if not (is_decided or unscales) and is_dense_real:
        with suppress(ConfigError, RuntimeError):  # not for this dtype or device
            return made(fused=True)
    return plain


def states_per_parameter(optimizer: Mapping[str, Any]) -> int:
    """Returns how many tensors of a parameter's size the optimizer keeps, from one step on a tiny parameter."""
    probe = nn.Parameter(torch.zeros(2, 3))
    probe.grad = torch.zeros(2, 3)
    made = build(optimizer, "workload.optimizer", [{"params": [probe]}])
    try:
        made.step()
        state = made.state[probe].values()
    except Exception as error:  # noqa: BLE001  the user's own optimizer: training will show its error
        _LOG.info(
            "workload.optimizer: a step on a tiny parameter failed (%r); %d states assumed.", error, _USUAL_STATES
        )
        return _USUAL_STATES
    return sum(value.shape == probe.shape for value in state if isinstance(value, torch.Tensor))


def make_schedule(config: RunConfig, optimizer: torch.optim.Optimizer) -> Any:
    """Returns the scheduler that ``workload.schedule._target_`` names. Nested ones step the same optimizer."""

    def made(node: Mapping[str, Any], where: str) -> Any:
        inner = node.get("schedulers")
        inside = {} if inner is None else {"schedulers": [made(each, f"{where}.schedulers") for each in inner]}
        return build(node, where, optimizer=optimizer, **inside)  # those of the same name are not built

    return made(config.workload.schedule.target or {}, "workload.schedule")


def make_scheduling(config: RunConfig) -> Scheduling | None:
    """Returns the configured scheduler with its interval; None if ``workload.schedule._target_`` is not set."""
    schedule = config.workload.schedule
    if schedule.target is None:
        return None
    interval: Any = None if schedule.interval is None else schedule.interval.value
    return Scheduling(lambda optimizer: make_schedule(config, optimizer), interval, schedule.monitor)


def try_schedule(config: RunConfig, model: nn.Module) -> None:
    """Raises the ConfigError that building the scheduler of a plain model would raise."""
    scheduling = make_scheduling(config)
    if scheduling is not None:
        groups = [dict(group) for group in parameter_groups(model)]
        scheduling.of(build(config.workload.optimizer, "workload.optimizer", groups))
