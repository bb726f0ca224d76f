"""Steps of a fused Adam without torch's Python around the kernel, which takes 100 us a step on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer


def make_step(optimizer: torch.optim.Optimizer) -> None:
    """Makes a step of any optimizer, bit for bit as its ``step()``.

    Calls the kernels of a fused Adam for usual weights and options. All else is left to torch, and steps that something
    observes.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or _is_observed(optimizer):
        optimizer.step()
        return
    optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers ask for it
    found = []
    for group in optimizer.param_groups:
        weights = [weight for weight in group["params"] if weight.grad is not None]
        states = [optimizer.state.get(weight) for weight in weights]
        if not (all(states) and _is_usual(group, weights)):
            optimizer.step()
            return
        if weights:
            found.append((group, weights, states))
    was_enabled = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)  # `torch.no_grad` calls seven functions
    try:
        for group, weights, states in found:
            _update(group, weights, states, is_decoupled=type(optimizer) is torch.optim.AdamW)
    finally:
        torch._C._set_grad_enabled(was_enabled)


def _is_observed(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether a hook, a profiler or a replaced ``step`` takes part; a scheduler's wrapper does not count."""
    own = vars(optimizer).get("step")
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    hooks = hooks or torch_optimizer._global_optimizer_pre_hooks or torch_optimizer._global_optimizer_post_hooks
    is_replaced = own is not None and getattr(own, "__wrapped__", None) is not type(optimizer).step
    return is_replaced or bool(hooks) or torch._C._autograd._profiler_enabled()


def _is_usual(group: dict[str, Any], weights: list[nn.Parameter]) -> bool:
    """Returns whether the options are plain numbers, and the weights dense parameters of one device and type."""
    if group["amsgrad"] or group["maximize"] or group["capturable"] or group["differentiable"] or not group["fused"]:
        return False
    kinds = {(type(one), one.device, one.dtype, one.grad.is_sparse) for one in weights if one.grad is not None}
    kind, *_, is_sparse = next(iter(kinds), (nn.Parameter, False))
    is_one_kind = len(kinds) <= 1 and kind is nn.Parameter and not is_sparse
    return is_one_kind and Tensor not in {*map(type, (group["lr"], *group["betas"]))}


def _update(group: dict[str, Any], weights: list[Any], states: list[Any], *, is_decoupled: bool) -> None:
    kernel = torch._fused_adamw_ if group.get("decoupled_weight_decay", is_decoupled) else torch._fused_adam_
    steps, (beta1, beta2) = [state["step"] for state in states], group["betas"]
    torch._foreach_add_(steps, 1)
    kernel(
        weights,
        [weight.grad for weight in weights],
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
