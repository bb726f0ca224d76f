"""The numbers of one optimizer step: micro-batches, their weights, and what they report."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from wellfed import batches
from wellfed.batches import Delivery
from wellfed.contract import Batch, FeatureSource, LossOutput
from wellfed.memory import oom
from wellfed.sample_rng import SampleRng

_LOG = logging.getLogger(__name__)
WITH_CUDA_GRAPHS = ("reduce_overhead", "max_autotune")
"""``gpu.compile`` modes in which torch records CUDA graphs."""


class Totals:
    """Weighted sums of metrics on the device; handed over in one transfer.

    ``pending`` holds the current step's until it is known to have succeeded, so that a step done again after an
    out-of-memory error counts once.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._pending: list[tuple[str, Tensor]] = []
        self.count = 0

    def add(self, name: str, value: Tensor, share: float, *, is_overwritten: bool = False) -> None:
        """A micro-batch's mean with its share of the step, 0..1.

        Args:
            is_overwritten: the memory of ``value`` is written to again before the sums are taken.
        """
        value = value.detach().float()
        if share != 1:
            value = value * share
        elif is_overwritten:
            value = value.clone()
        self._pending.append((name, value))

    def drop(self) -> None:
        """The step failed and will be done again."""
        self._pending.clear()

    def commit(self) -> None:
        """The step succeeded; nothing to do where it was left out."""
        if not self._pending:
            return
        for name, value in self._pending:
            self._sums[name] = self._sums[name].to(value.device) + value if name in self._sums else value
        self._pending.clear()
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        """The sums since the last `take`, for a checkpoint."""
        return {"sums": dict(self._sums), "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with these sums."""
        self._sums, self.count = dict(state["sums"]), int(state["count"])

    def forget(self) -> None:
        """Begin anew."""
        self._sums, self.count = {}, 0

    def take(self, reduce: Callable[[Tensor], Tensor] | None = None) -> dict[str, float]:
        """Means over the steps since the last call; waits for the device once.

        Args:
            reduce: the mean of a tensor over all ranks, where there are several.
        """
        if not self._sums or not self.count:
            return {}
        stacked = torch.stack([value.reshape(()) for value in self._sums.values()]) / self.count
        means = dict(zip(self._sums, (reduce(stacked) if reduce else stacked).tolist(), strict=True))
        self.forget()
        return means


class Preparation:
    """What happens to a micro-batch on the device before the model sees it: the data's ``on_device``, if it has one."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._seed = seed
        self._on_device: Callable[..., Batch] | None = getattr(dataset, "on_device", None)
        self._weight: Callable[[Batch], int] | None = getattr(dataset, "weight", None)
        self._split: Callable[[Batch, list[int]], list[Batch]] = getattr(dataset, "split", batches.split)

    def split(self, batch: Batch, sizes: list[int]) -> list[Batch]:
        """Successive parts of a batch; in place of one of no samples the batch's first, to be counted as none."""
        if len(sizes) == 1:
            return [batch]
        if 0 not in sizes:
            return self._split(batch, sizes)
        first = self._split(batch, [1, sum(sizes) - 1])[0] if sum(sizes) > 1 else batch
        parts = iter(self.split(batch, [size for size in sizes if size]))
        return [next(parts) if size else first for size in sizes]

    @property
    def has_own_weight(self) -> bool:
        """The data says itself what a batch counts."""
        return self._weight is not None

    def weight(self, part: Batch, num_samples: int) -> int:
        """What a part of so many samples counts; its loss is a mean over exactly this.

        Where the data says it itself (``int(mask.sum())``, say), this waits for the device that holds the part.
        """
        return num_samples if self._weight is None or num_samples == 0 else int(self._weight(part))

    def weights(self, delivery: Delivery, parts: list[Batch], sizes: list[int]) -> list[int]:
        """The weight of each part, as `weigh` has found it where these are the parts that it was told of."""
        if delivery.weights is not None and delivery.weights[0] == sizes:
            return delivery.weights[1]
        return [self.weight(part, size) for part, size in zip(parts, sizes, strict=True)]

    def weigh(self, delivery: Delivery, sizes: list[int]) -> None:
        """Note what each part will count, while the batch is on the host and nothing need be waited for."""
        if self._weight is not None:
            parts = self.split(delivery.batch, sizes)
            delivery.weights = sizes, [self.weight(part, size) for part, size in zip(parts, sizes, strict=True)]

    def __call__(self, batch: Batch, delivery: Delivery, part: int, features: FeatureSource | None) -> Batch:
        """The batch as the workload prepares it on the device."""
        if self._on_device is None:
            return batch
        device = next(batches.tensors(batch)).device
        rng = SampleRng(self._seed, delivery.epoch, delivery.index, part, device=device)
        return self._on_device(batch, rng) if features is None else self._on_device(batch, rng, features)


class Loss:
    """``model.loss``, compiled where asked; a compile that fails is given up for good.

    ``has_compiled`` turns true when a call has compiled something (a new shape does); reset by who reads it.
    """

    def __init__(self, model: nn.Module, compile_mode: str, on_failure: Callable[[str], None]) -> None:
        self._model, self._on_failure = model, on_failure
        self._compiled: Callable[[Batch], LossOutput] | None = None
        self._mode = compile_mode
        self.has_compiled = False
        if compile_mode != "none":
            self._compiled = torch.compile(model.loss, mode=compile_mode.replace("_", "-"))  # type: ignore[arg-type]

    @property
    def overwrites(self) -> bool:
        """Each call writes to the memory of what the one before has returned, and of the gradients that came of it:
        CUDA graphs have their results in one place. What is needed longer must be copied.
        """
        return self._compiled is not None and self._mode in WITH_CUDA_GRAPHS

    def __call__(self, batch: Batch) -> LossOutput:
        """The model's loss for the batch, compiled where that works."""
        if self._compiled is not None:
            try:
                before = compiled_graphs()
                if self.overwrites:
                    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
                output = self._check(self._compiled(batch))
                self.has_compiled = self.has_compiled or compiled_graphs() != before
                return output
            except Exception as error:
                if not is_of_compiler(error):
                    raise
                self._compiled, self.has_compiled = None, True
                first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
                _LOG.warning("gpu.compile failed (%s); going on without it.", first)
                self._on_failure(first)
        return self._check(self._model.loss(batch))  # type: ignore[operator]

    def _check(self, output: Any) -> LossOutput:
        if not isinstance(output, LossOutput):
            raise TypeError(f"{type(self._model).__name__}.loss returned {type(output).__name__}, not a LossOutput.")
        return output


def compiled_graphs() -> int:
    """Graphs that torch.compile has made in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def is_of_compiler(error: Exception) -> bool:
    """Whether torch.compile could not compile, and not the code that it compiles failed."""
    from torch._dynamo import exc
    from torch._inductor import exc as inductor

    known: list[type[Exception]] = [exc.TorchDynamoException]
    known += [kind for name in ("InductorError", "CppCompileError") if (kind := getattr(inductor, name, None))]
    if isinstance(error, tuple(known)):
        return True
    if oom.classify(error) is not None:
        return False
    # Errors of some types pass through the compiler as they are; the code's own are raised when it runs.
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__") == "torch._dynamo.convert_frame" for frame, _ in frames)


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """``model.param_groups()`` where the model has it, else one group of all trainable parameters."""
    offered = getattr(model, "param_groups", None)
    if callable(offered):
        return list(offered())
    return [{"params": [parameter for parameter in model.parameters() if parameter.requires_grad]}]


def log_values(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as plain floats, whatever number type they came in."""
    return {name: float(value) for name, value in metrics.items()}
