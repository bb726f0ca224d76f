"""Allocates an optimizer's state before the first batch, and detects whether a step was applied in part."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from wellfed.train.memory import oom

_LOG = logging.getLogger(__name__)
_RATES = ("lr", "weight_decay")
"""Settings that change a weight whose gradient is zero."""
_MOSTLY = frozenset((Tensor, float, int, bool, type(None), list, tuple))
"""Types of nearly all settings and states, none of them a subclass of another."""


def allocate(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    """Allocates the optimizer's state by a step with rate 0 on zero gradients; returns whether it did.

    Weights and later steps stay bit for bit the same. This is first tried on a small copy of the optimizer. If the copy
    differs (an optimizer that keeps its first gradient), nothing is done. Existing states are kept, so only newly
    trained weights get one. Peak memory is that of an ordinary step.

    Raises:
        torch.OutOfMemoryError: memory does not suffice. Only torch's counts of changes may differ then.
    """
    of_all = [weight for group in optimizer.param_groups for weight in group["params"] if weight.requires_grad]
    known = list(optimizer.state)
    weights = [weight for weight in of_all if weight not in optimizer.state]
    with torch.random.fork_rng(devices={weight.device for weight in weights if weight.is_cuda}):
        if not weights or not _is_a_fresh_start(optimizer):
            return False
        # As in nn.Embedding(sparse=True).
        sparse_modules = [module for module in model.modules() if getattr(module, "sparse", False) is True]
        sparse = {weight for module in sparse_modules for weight in module.parameters(recurse=False)}
        try:
            for weight in of_all:
                weight.grad = None  # a gradient of the previous step would change an existing state
            for weight in weights:
                weight.grad = _no_change(weight) if weight in sparse else torch.zeros_like(weight)
            _step_in_place(optimizer)
        except BaseException:
            for weight in [weight for weight in optimizer.state if weight not in known]:
                del optimizer.state[weight]
            raise
        finally:
            for weight in weights:
                weight.grad = None
    return True


class BeforeStep:
    """State of an optimizer before a step, to detect whether a failed step has changed anything."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._had_state, self._counts = optimizer, bool(optimizer.state), _counts(optimizer)

    def is_as_it_was(self) -> bool:
        """Returns whether the step can be repeated. If there were no states before, new ones are deleted, since the
        next step would expect all of them."""
        if not self._had_state:
            self._optimizer.state.clear()
        return _counts(self._optimizer) == self._counts


def _counts(optimizer: torch.optim.Optimizer) -> list[float]:
    """Returns torch's counts of changes of all weights and states, and the numbers in states and groups."""
    groups = optimizer.param_groups
    found: list[float] = [weight._version for group in groups for weight in group["params"]]
    for held in (*groups, *optimizer.state.values()):
        for value in held.values():
            kind = type(value)
            if kind is Tensor:
                found.append(value._version)
            elif kind is float or kind is int:
                found.append(value)
            elif kind not in _MOSTLY and isinstance(value, Tensor):
                found.append(value._version)
    return found


def one_weight_at_a_time(optimizer: torch.optim.Optimizer) -> bool:
    """Makes the optimizer step one weight at a time; returns whether that changes anything. Slower, but needs no
    temporaries of the size of all weights."""
    has_changed = False
    for group in optimizer.param_groups:
        foreach = group.get("foreach", False)
        if foreach is None:  # torch then decides: all at once on a GPU
            foreach = all(weight.is_cuda for weight in group["params"])
        if foreach and not group.get("fused"):
            group["foreach"] = False
            has_changed = True
    return has_changed


def _step_in_place(optimizer: torch.optim.Optimizer) -> None:
    """Makes a step that changes no weight, and resets the step counts of new states to 0."""
    known = set(optimizer.state)
    kept = [(group, name, group[name]) for group in optimizer.param_groups for name in _RATES if name in group]
    try:
        for group, name, rate in kept:
            group[name] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
        optimizer.step()
    finally:
        for group, name, rate in kept:
            group[name] = rate
    for weight, state in optimizer.state.items():
        count = None if weight in known else state.get("step")
        if isinstance(count, Tensor):
            count.zero_()
        elif count is not None:
            state["step"] = type(count)(0)


def _is_a_fresh_start(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether three steps of a small copy give the same with and without `_step_in_place` before them."""
    try:
        plain, begun = (_three_steps(optimizer, begins=begins) for begins in (False, True))
    except Exception as error:  # an error of the user's optimizer, which training will raise again
        if oom.classify(error) is not None:
            raise
        _LOG.info("the optimizer's state is made by its first step: a step of a small copy failed (%r)", error)
        return False
    return all(torch.equal(one, other) for one, other in zip(plain, begun, strict=True))


def _three_steps(optimizer: torch.optim.Optimizer, *, begins: bool) -> list[Tensor]:
    weights: list[Tensor] = []
    groups: list[dict[str, Any]] = []
    draw = torch.Generator().manual_seed(1)
    for group in optimizer.param_groups:
        weights.append(torch.randn(3, 2, generator=draw).to(group["params"][0].detach()).requires_grad_())
        options = {name: value for name, value in group.items() if name not in ("params", "initial_lr")}
        groups.append({**options, "params": [weights[-1]]})
    make: Any = type(optimizer)
    copy, is_sparse = make(groups), isinstance(optimizer, torch.optim.SparseAdam)
    if begins:
        for weight in weights:
            weight.grad = _no_change(weight) if is_sparse else torch.zeros_like(weight)
        _step_in_place(copy)
    for _ in range(3):
        for weight in weights:
            gradient = torch.randn(3, 2, generator=draw).to(weight)
            weight.grad = gradient.to_sparse(1) if is_sparse else gradient
        copy.step()
    return [weight.detach() for weight in weights]


def _no_change(weight: Tensor) -> Tensor:
    indices = torch.empty((1, 0), dtype=torch.long, device=weight.device)
    values = weight.detach().new_empty((0, *weight.shape[1:]))
    return torch.sparse_coo_tensor(indices, values, weight.shape, check_invariants=False)
