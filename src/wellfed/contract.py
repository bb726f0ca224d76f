"""Declares what a workload offers the engine, in plain PyTorch: two files and one yaml.

``model.py`` holds an ``nn.Module`` with ``loss(batch) -> LossOutput``; ``data.py`` holds
``datasets(...) -> Datasets``. Nothing of Lightning, devices, workers or logging is needed in either.
This file knows no torch at run time (annotations only), so that anyone may import it early.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Tensor


Batch = Any
"""A tensor, or nested tuple/list/dict/dataclass of tensors that share their first dimension."""


@dataclass
class LossOutput:
    """What ``model.loss(batch)`` returns."""

    loss: Tensor
    """Scalar, the mean over exactly the batch's weight (default: its first dimension)."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Scalars, means over the same weight; on the device, no ``.item()``: the engine detaches and averages them."""
    num_samples: int | None = None
    """Samples in the batch for samples/s; None = the first dimension."""
    predictions: Any = None
    """What metrics of torchmetrics take first, or a mapping of all that their ``update`` takes; for them alone."""
    targets: Any = None
    """What they take second; None = nothing."""


class FeatureSource(Protocol):
    """Rows of precomputed or computed features; what ``on_device`` and evaluations are handed as ``features``."""

    def rows(self, indices: Tensor) -> Tensor:
        """Float rows ``[len(indices), dim]`` on the device of ``indices``."""


FeatureModeName = Literal["cache", "cache_host", "dynamic"]
FEATURE_MODES: tuple[FeatureModeName, ...] = get_args(FeatureModeName)
"""What ``memory.features`` may be, the fastest first; each needs less device memory than the one before."""


@dataclass(frozen=True)
class Features:
    """Inputs that are the same in every epoch and dear to compute: the engine may keep them in GPU or host memory.

    ``memory.features`` decides: ``cache`` and ``cache_host`` call ``rows`` once over all indices and hold the
    result; ``dynamic`` calls it for every batch. The numbers are the same within 1e-5 (fp32).
    """

    num_rows: int
    bytes: int
    """Size of the whole table as it would be held."""
    rows: Callable[[Tensor], Tensor]
    """Long indices ``[n]`` to rows ``[n, ...]``: on the model's device where the model offers them, on the CPU where
    `Datasets` does."""
    trainable: bool = False
    """True if gradients flow through ``rows``: then only ``dynamic`` is right, and ``memory.stages`` may keep what is
    behind the rows frozen until then."""
    store: Callable[[], Tensor] | None = None
    """For rows that overlap, as windows of a series and crops of images do: the tensor on the CPU that they are cut
    from, of ``bytes``. It is kept in the place of a table of rows."""
    cut: Callable[[Tensor, Tensor], Tensor] | None = None
    """With ``store``: the store (on any device) and long indices ``[n]`` beside it to rows ``[n, ...]``."""


@runtime_checkable
class TrainData(Protocol):
    """A map-style training set. Optional methods are looked up by name; see ``docs/workloads.md``.

    - ``fetch(indices, rng) -> batch``: a whole batch at once, CPU tensors; randomness through ``rng`` only
      (``indices``: long tensor on the CPU, ``rng``: `wellfed.SampleRng`).
    - ``on_device(batch, rng)``: augmentation and float conversion on the device; with features,
      ``on_device(batch, rng, features)``. Called once per micro-batch.
    - ``split(batch, sizes) -> list[batch]`` and ``weight(batch) -> int``: for layouts whose parts do not share the
      first dimension. ``weight`` is asked before the forward pass.
    - ``for_features(mode) -> data``: of this set or a split, where `Datasets` offers features: the same samples, whose
      batches carry what ``on_device`` and the evaluation lack in that mode. With ``cache`` that is indices of rows
      alone; else the raw rows too, read by whoever builds the batch. A batch without them stays right in any mode.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class Evaluation(Protocol):
    """Turns model outputs on a split into numbers. Additive: splitting a batch must not change the result.

    With features, ``update`` is handed them as a third argument. The means of ``model.loss`` and of its metrics are
    taken beside it; ``with_loss = False`` in the class leaves them out, where a split's batches are none for the loss.

    Optional, both or none: with several GPUs each then evaluates some of the batches, else every one evaluates all.

    - ``state() -> Any``: what has been taken in since ``reset``, as nested tuples, lists and dicts of tensors and
      numbers. It is sent to the other ranks, tensors by way of the CPU.
    - ``merge(states)``: forget what has been taken in, and go on from these states, those of rank 0, 1 and so on;
      ``compute`` and ``artifacts`` speak of all of them then. Batch i of the split was taken in by rank
      ``i % len(states)``.
    """

    best_metric: str
    """Key of ``compute()`` that decides which checkpoint is ``best``."""
    best_mode: Literal["max", "min"]

    def reset(self) -> None:
        """Forget everything; called before each pass."""

    def update(self, model: torch.nn.Module, batch: Batch, /, *features: FeatureSource) -> None:
        """Take one batch in; stays on the device, no synchronisation."""

    def compute(self) -> dict[str, float]:
        """The metrics over all batches since ``reset``; one transfer to the host."""

    def artifacts(self, folder: Path) -> dict[str, Path]:
        """Files worth keeping (plots, tables), written into ``folder``; name -> path. May be empty."""


@dataclass(frozen=True)
class Datasets:
    """What ``datasets(...)`` returns."""

    train: Any
    """Map-style (see `TrainData`), a stream (torch's IterableDataset, or an iterable of batches), or a DataLoader."""
    val: Any | None = None
    test: Any | None = None
    collate: Callable[[list[Any]], Batch] | None = None
    """For data without ``fetch``; None = torch's default collate."""
    eval_collate: Callable[[list[Any]], Batch] | Mapping[str, Callable[[list[Any]], Batch]] | None = None
    """As ``collate``, for ``val`` and ``test``, or one for each by its name; None = ``collate``."""
    eval_batch_size: int | Mapping[str, int] | None = None
    """Samples per batch of ``val`` and ``test``, or a number for each; ``workload.eval_batch_size`` goes before it.
    None = the micro-batch."""
    features: Features | None = None
    """What the data themselves hold or prepare (a scaled series, decoded images); a model's are offered by
    ``model.features()``. Not both."""
    evaluation: Evaluation | Any | None = None
    """Or a Metric or MetricCollection of torchmetrics. None = the means of ``model.loss`` and of its metrics over the
    split, best = lowest loss."""
    model_args: Mapping[str, Any] = field(default_factory=dict)
    """Constructor arguments of the model that only the data knows (vocabulary sizes, tables)."""
    derived: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    """Values that follow from the data, for knobs left null: ``{"workload.data.sample_rate": (8000, "all 288 clips have
    it")}``. Knobs are entries of ``workload.data``, ``workload.model`` or ``workload.optimizer``. The engine fills in
    those of the model and the optimizer; a typed value stays. The plan shows each with its reason, and a resumed or
    evaluated run keeps them."""
    notes: tuple[str, ...] = ()
    """What the reader noticed (skipped lines, dropped users); shown once and kept in the log."""
