"""Declares the interface between a workload and the engine, in plain PyTorch: two files and one yaml.

``model.py`` holds an ``nn.Module`` with ``loss(batch) -> LossOutput``; ``data.py`` holds ``datasets(...) -> Datasets``.
Neither needs Lightning, devices, workers or logging.
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
"""A tensor, or nested tuples, lists, dicts and dataclasses of tensors that share their first dimension."""


@dataclass
class LossOutput:
    """The result of ``model.loss(batch)``."""

    loss: Tensor
    """Scalar, the mean over exactly the batch's weight (default: its first dimension)."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Scalars, means over the same weight, on the device, without ``.item()``: the engine detaches and averages."""
    num_samples: int | None = None
    """Samples in the batch for samples/s; None = the first dimension."""
    predictions: Any = None
    """First argument of torchmetrics' ``update``, or a mapping of all its arguments; used by these metrics only."""
    targets: Any = None
    """Second argument of torchmetrics' ``update``; None = none."""


class FeatureSource(Protocol):
    """Rows of precomputed or computed features: the argument ``features`` of ``on_device`` and of evaluations."""

    def rows(self, indices: Tensor) -> Tensor:
        """Returns float rows ``[len(indices), dim]`` on the device of ``indices``."""


FeatureModeName = Literal["cache", "cache_host", "dynamic"]
FEATURE_MODES: tuple[FeatureModeName, ...] = get_args(FeatureModeName)
"""Values of ``memory.features``, fastest first; each needs less device memory than the one before."""


@dataclass(frozen=True)
class Features:
    """Inputs that are the same in every epoch and expensive to compute; the engine may hold them in GPU or host memory.

    ``memory.features`` decides: ``cache`` and ``cache_host`` call ``rows`` once over all indices and hold the
    result; ``dynamic`` calls it for every batch. The values are the same within 1e-5 (fp32).
    """

    num_rows: int
    bytes: int
    """Bytes of the whole table in memory."""
    rows: Callable[[Tensor], Tensor]
    """Maps long indices ``[n]`` to rows ``[n, ...]``: on the model's device if the model offers the features, else on
    the CPU."""
    trainable: bool = False
    """Whether gradients flow through ``rows``. Then only ``dynamic`` is correct."""
    store: Callable[[], Tensor] | None = None
    """Returns the tensor on the CPU, of ``bytes``, that overlapping rows (windows of a series, crops of images) are cut
    from. It is held instead of a table of rows."""
    cut: Callable[[Tensor, Tensor], Tensor] | None = None
    """With ``store``: maps the store (on any device) and long indices ``[n]`` on its device to rows ``[n, ...]``."""


@runtime_checkable
class TrainData(Protocol):
    """A map-style training set. The engine finds optional methods by name; see ``docs/workloads.md``.

    - ``fetch(indices, rng) -> batch``: a whole batch at once, CPU tensors; randomness through ``rng`` only
      (``indices``: long tensor on the CPU, ``rng``: `wellfed.SampleRng`).
    - ``__getitems__(indices) -> list``: the samples of a batch, as torch's DataLoader reads them; without ``fetch``.
    - ``set_epoch(epoch)``: called before the first batch of each epoch, in each process that builds batches.
    - ``on_device(batch, rng)``: augmentation and float conversion on the device; with features,
      ``on_device(batch, rng, features)``. Called once per micro-batch.
    - ``split(batch, sizes) -> list[batch]`` and ``weight(batch) -> int``: for layouts whose tensors do not share the
      first dimension. ``weight`` is called before the forward pass.
    - ``for_features(mode) -> data``: for this set or a split, if `Datasets` offers features. Returns the same samples
      with batches for that mode. With ``cache`` they hold only indices of rows, else also the raw rows. A batch
      without raw rows is correct in any mode.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class Evaluation(Protocol):
    """Turns model outputs on a split into numbers. Additive: splitting a batch must not change the result.

    With features, ``update`` gets them as a third argument. The engine also takes the means of ``model.loss`` and its
    metrics. ``with_loss = False`` in the class disables that, if a split's batches do not fit the loss.

    Two optional methods (both or none) let each of several GPUs evaluate a share of the batches. Without them each
    evaluates all.

    - ``state() -> Any``: everything accumulated since ``reset``, as nested tuples, lists and dicts of tensors and
      numbers. It is sent to the other ranks, tensors through the CPU.
    - ``merge(states)``: replaces what was accumulated by the states of rank 0, 1 and so on. ``compute`` and
      ``artifacts`` then cover all of them. Rank ``i % len(states)`` has evaluated batch i of the split.
    """

    best_metric: str
    """Key of ``compute()`` that decides which checkpoint is ``best``."""
    best_mode: Literal["max", "min"]

    def reset(self) -> None:
        """Discards everything accumulated; called before each pass."""

    def update(self, model: torch.nn.Module, batch: Batch, /, *features: FeatureSource) -> None:
        """Adds one batch, on the device and without synchronisation."""

    def compute(self) -> dict[str, float]:
        """Returns the metrics over all batches since ``reset``, with one transfer to the host."""

    def artifacts(self, folder: Path) -> dict[str, Path]:
        """Writes files worth keeping (plots, tables) into ``folder``; returns their paths by name, or nothing."""


@dataclass(frozen=True)
class Datasets:
    """The result of ``datasets(...)``."""

    train: Any
    """Map-style (see `TrainData`), a stream (torch's IterableDataset, or an iterable of batches), or a DataLoader."""
    val: Any | None = None
    test: Any | None = None
    collate: Callable[[list[Any]], Batch] | None = None
    """Collate function for data without ``fetch``; None = torch's default collate."""
    eval_collate: Callable[[list[Any]], Batch] | Mapping[str, Callable[[list[Any]], Batch]] | None = None
    """Collate function of ``val`` and ``test``, or one for each by name; None = ``collate``."""
    eval_batch_size: int | Mapping[str, int] | None = None
    """Samples per batch of ``val`` and ``test``, or a number for each by name. ``workload.eval_batch_size`` has
    precedence. None = the micro-batch."""
    features: Features | None = None
    """Features that the data hold or prepare (a scaled series, decoded images). A model offers its features by
    ``model.features()``; only one of the two may."""
    evaluation: Evaluation | Any | None = None
    """An evaluation, or a Metric or MetricCollection of torchmetrics. None = the means of ``model.loss`` and its
    metrics over the split; the best checkpoint has the lowest loss."""
    model_args: Mapping[str, Any] = field(default_factory=dict)
    """Constructor arguments of the model that only the data knows (vocabulary sizes, tables)."""
    derived: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    """Values that follow from the data, for knobs that are null, each with its reason:
    ``{"workload.data.sample_rate": (8000, "all 288 clips have it")}``. Knobs are entries of ``workload.data``,
    ``workload.model`` or ``workload.optimizer``. The engine sets those of the model and the optimizer; typed values
    stay. The plan shows each with its reason. Resumed and evaluated runs keep them."""
    notes: tuple[str, ...] = ()
    """Remarks of the reader (skipped lines, dropped users); shown once and kept in the log."""
