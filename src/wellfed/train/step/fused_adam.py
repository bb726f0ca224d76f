"""Makes an optimizer's step, and knows whether a failed one has changed anything.

Calls the kernel of a fused Adam directly: torch's Python around it takes several times as long on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from wellfed.train.memory.optimizer_state import BeforeStep


class OptimizerStep:
    """Steps of an optimizer.

    Args:
        make: makes a step; None = the optimizer's own method, found anew in each step: users may replace it.
        may_repeat: whether a failed step may be repeated. Needed by `is_as_it_was`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        make: Callable[[Callable[[], Tensor]], Any] | None = None,
        *,
        may_repeat: bool = True,
    ) -> None:
        self._optimizer, self._make, self._may_repeat = optimizer, make, may_repeat
        self._before: BeforeStep | None = None

    def __call__(self, closure: Callable[[], Tensor]) -> None:
        """Makes a step with the gradients that the closure computes."""
        self._note()
        (self._make or self._optimizer.step)(closure)  # type: ignore[arg-type]

    def is_as_it_was(self) -> bool:
        """Returns whether the step, which failed, can be repeated. Deletes states if there were none before."""
        return self._before is None or self._before.is_as_it_was()

    def _note(self) -> None:
        if self._may_repeat:
            self._before = BeforeStep(self._optimizer)


class FusedAdam(OptimizerStep):
    """Steps of a fused `torch.optim.Adam` or `AdamW`, bit for bit those of torch.

    torch makes the step itself if an option or a weight is unusual, if a weight has no state yet, if its ``step`` was
    replaced, and while a hook or a profiler observes its steps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, may_repeat: bool = True) -> None:
        super().__init__(optimizer, may_repeat=may_repeat)
        self._is_adamw = type(optimizer) is torch.optim.AdamW
        self._has_begun = False
        """Whether the kernels were called, which change weights and states."""
        self._checked: list[tuple[list[Tensor], int]] = []
        """Weights of each group that `_are_usual` is about, and how many they were."""
        self._are_usual = False

    def __call__(self, closure: Callable[[], Tensor]) -> None:
        """Makes a step with the gradients that the closure computes."""
        optimizer, self._before, self._has_begun = self._optimizer, None, False
        if self._is_observed(optimizer):
            super().__call__(closure)
            return
        closure()
        optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers of torch ask for it
        found, state = [], optimizer.state
        self._check_weights(optimizer.param_groups)
        for group in optimizer.param_groups:
            weights, gradients = [], []
            states: list[Any] = []
            for weight in group["params"]:
                if (gradient := weight.grad) is not None:
                    weights.append(weight)
                    gradients.append(gradient)
                    states.append(state.get(weight))
                    if not states[-1] or gradient.is_sparse:
                        self._step_by_torch()
                        return
            if not self._are_usual or not _has_usual_options(group):
                self._step_by_torch()
                return
            found.append((group, weights, gradients, states))
        was_enabled = torch.is_grad_enabled()
        self._has_begun = True
        torch._C._set_grad_enabled(False)  # `torch.no_grad` calls seven functions
        try:
            for group, weights, gradients, states in found:
                if weights:
                    is_decoupled = group.get("decoupled_weight_decay", self._is_adamw)  # torch 2.6 has no such key
                    kernel = torch._fused_adamw_ if is_decoupled else torch._fused_adam_
                    _update(kernel, group, weights, gradients, states)
        finally:
            torch._C._set_grad_enabled(was_enabled)

    def is_as_it_was(self) -> bool:
        """Returns whether the step, which failed, can be repeated. Deletes states if there were none before."""
        return not self._has_begun and super().is_as_it_was()

    def _step_by_torch(self) -> None:
        self._note()
        self._optimizer.step()

    def _is_observed(self, optimizer: torch.optim.Optimizer) -> bool:
        """Returns whether anything but torch's own ``step`` takes part in a step."""
        own = vars(optimizer).get("step")
        if own is not None and getattr(own, "__wrapped__", None) is not type(optimizer).step:  # not by a scheduler
            return True
        hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        hooks = hooks or torch_optimizer._global_optimizer_pre_hooks or torch_optimizer._global_optimizer_post_hooks
        return bool(hooks) or torch._C._autograd._profiler_enabled()

    def _check_weights(self, groups: list[dict[str, Any]]) -> None:
        """Sets whether all weights are parameters of one device and precision in each group, if they have changed."""
        checked = self._checked
        if len(checked) == len(groups):
            for (weights, number), group in zip(checked, groups, strict=True):
                if group["params"] is not weights or len(weights) != number:
                    break
            else:
                return
        self._checked = [(group["params"], len(group["params"])) for group in groups]
        self._are_usual = all(
            len({(type(weight), weight.device, weight.dtype) for weight in group["params"]}) == 1
            and type(group["params"][0]) is nn.Parameter
            for group in groups
        )


def _has_usual_options(group: dict[str, Any]) -> bool:
    """Returns whether the kernel takes the options as they are now."""
    if group["amsgrad"] or group["maximize"] or group["capturable"] or group["differentiable"] or not group["fused"]:
        return False
    beta1, beta2 = group["betas"]
    for number in (group["lr"], beta1, beta2, group["weight_decay"], group["eps"]):
        if not isinstance(number, (float, int)):
            return False
    return True


def _update(
    kernel: Callable[..., Any],
    group: dict[str, Any],
    weights: list[Tensor],
    gradients: list[Tensor],
    states: list[dict[str, Tensor]],
) -> None:
    steps = [state["step"] for state in states]
    torch._foreach_add_(steps, 1)
    beta1, beta2 = group["betas"]
    kernel(
        weights,
        gradients,
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


def step_of(optimizer: torch.optim.Optimizer, *, may_repeat: bool = True) -> OptimizerStep:
    """Returns what makes the optimizer's step: `FusedAdam` for an Adam of torch."""
    is_adam = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    return (FusedAdam if is_adam else OptimizerStep)(optimizer, may_repeat=may_repeat)
