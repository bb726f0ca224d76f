"""Calls the kernel of a fused Adam directly: torch's Python around it takes several times as long on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

_SLOWER = ("amsgrad", "maximize", "capturable", "differentiable")
"""Options of a group with which torch makes the step."""


class FusedAdam:
    """Steps of a fused `torch.optim.Adam` or `AdamW`, bit for bit those of torch.

    torch makes the step itself if an option or a weight is unusual, if a weight has no state yet, and while a hook or a
    profiler observes its steps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._checked: Any = None
        """Groups that `_is_usual` is about; loading a checkpoint replaces them."""
        self._is_usual = False

    def __call__(self, closure: Callable[[], Tensor]) -> None:
        """Makes a step with the gradients that the closure computes."""
        optimizer = self._optimizer
        if self._is_for_torch(optimizer):
            optimizer.step(closure)  # type: ignore[arg-type]
            return
        closure()
        optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers of torch ask for it
        found, state = [], optimizer.state
        for group in optimizer.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            states = [state[weight] for weight in weights]
            if not all(states):
                optimizer.step()
                return
            found.append((group, weights, states))
        was_enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # `torch.no_grad` calls seven functions
        try:
            for group, weights, states in found:
                if weights:
                    _update(group, weights, states)
        finally:
            torch._C._set_grad_enabled(was_enabled)

    def _is_for_torch(self, optimizer: torch.optim.Optimizer) -> bool:
        if optimizer.param_groups is not self._checked:
            self._checked, self._is_usual = optimizer.param_groups, all(map(_is_usual, optimizer.param_groups))
        hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        hooks = hooks or torch_optimizer._global_optimizer_pre_hooks or torch_optimizer._global_optimizer_post_hooks
        return bool(hooks) or not self._is_usual or torch._C._autograd._profiler_enabled()


def _is_usual(group: dict[str, Any]) -> bool:
    kinds = {(type(weight), weight.device, weight.dtype) for weight in group["params"]}
    has_one_kind = len(kinds) == 1 and next(iter(kinds))[0] is nn.Parameter
    numbers = (group["lr"], *group["betas"], group["weight_decay"], group["eps"])
    has_numbers = all(isinstance(number, (float, int)) for number in numbers)
    return has_one_kind and has_numbers and bool(group["fused"]) and not any(group[name] for name in _SLOWER)


def _update(group: dict[str, Any], weights: list[Tensor], states: list[dict[str, Tensor]]) -> None:
    steps = [state["step"] for state in states]
    torch._foreach_add_(steps, 1)
    kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    beta1, beta2 = group["betas"]
    kernel(
        weights,
        [weight.grad for weight in weights],  # type: ignore[misc]  # none is None
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        steps,
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
        grad_scale=None,
        found_inf=None,
    )


def step_of(optimizer: torch.optim.Optimizer) -> Callable[[Callable[[], Tensor]], Any]:
    """Returns a function that makes the optimizer's step: `FusedAdam` for an Adam of torch, else the method itself."""
    own = vars(optimizer).get("step")
    is_replaced = own is not None and not hasattr(own, "_wrapped_by_lr_sched")  # by the user
    is_adam = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    return FusedAdam(optimizer) if is_adam and not is_replaced else optimizer.step  # type: ignore[return-value]
