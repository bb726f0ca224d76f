"""Holds a plain model on the device of its rank, with everything that its steps and evaluations need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from wellfed import batches
from wellfed.batches import Delivery
from wellfed.contract import FEATURE_MODES, Evaluation, Features, FeatureSource
from wellfed.data.device_prefetch import DevicePrefetcher
from wellfed.errors import OutOfMemoryExhausted
from wellfed.observe.loggers.log_media import logged_to
from wellfed.observe.timing.step_clock import StepClock
from wellfed.record.entries import OnEvent
from wellfed.train.loop.place import Place, Whole
from wellfed.train.memory import oom
from wellfed.train.memory.checkpointing import checkpoint_blocks
from wellfed.train.memory.features import FeatureTable, in_eval_mode
from wellfed.train.memory.step_down import Fallbacks, MicroBatches
from wellfed.train.memory.step_start import put_back
from wellfed.train.plain_model.scheduling import Scheduling
from wellfed.train.plain_model.split_metrics import SplitMetrics
from wellfed.train.step.loss import Loss, add_place
from wellfed.train.step.micro_batches import Preparation
from wellfed.train.step.precision import Precision
from wellfed.train.step.replicas import Ranks, Replicas
from wellfed.train.step.step_passes import Computation
from wellfed.train.step.totals import Totals
from wellfed.train.step.train_step import StepOptions, TrainStep
from wellfed.units import counted


class PlacedModel:
    """A plain model on one device, or one of several ranks, with its data, micro-batches, features and metrics.

    The model offers ``loss(batch)`` (see `wellfed.contract`). All ranks call each method alike.
    """

    def __init__(
        self,
        model: nn.Module,
        place: Place,
        options: StepOptions,
        *,
        train_data: Any,
        eval_data: Mapping[str, Any],
        micro: MicroBatches,
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        lr_factor: Callable[[int], float],
        on_event: OnEvent,
        scheduling: Scheduling | None = None,
        evaluation: Evaluation | Any | None = None,
        metrics: Any = None,
        features: Features | None = None,
    ) -> None:
        """``lr_factor``: factor on the learning rate by step, unless there is a ``scheduling``."""
        self.model, self.place, self.options = model, place, options
        self.micro, self.totals, self.on_event = micro, Totals(), on_event
        self.make_optimizer, self.lr_factor, self.scheduling = make_optimizer, lr_factor, scheduling
        prepare = partial(Preparation, seed=options.seed, model=model)
        self._prepare = prepare(train_data)
        self.evaluation = SplitMetrics(model, evaluation, metrics)
        self._prepare_split = {split: prepare(data) for split, data in eval_data.items()}
        self._evaluates_at_most: int | None = None
        """Maximum samples that are evaluated at a time; None = a whole batch."""
        self._features: FeatureTable | None = None
        fallbacks = {"memory.checkpoint_activations=true": self._checkpoint_activations}
        if features is not None:
            mode, may_change = options.feature_mode or "dynamic", options.goes_on(is_training=True)
            self._features = FeatureTable(features, mode, may_change=may_change)
            fallbacks |= {f"memory.features={mode}": partial(self._move_features, mode) for mode in FEATURE_MODES[1:]}
        self.fallbacks = Fallbacks(micro, fallbacks)
        self._loss = Loss(model, options.compile_mode)
        self.whole = Whole(model)
        self._wrapper: nn.Module | None = None
        self._is_on_cpu = False
        self.precision: Precision
        """Precision of the forward passes; known after `begin`."""

    def begin(self) -> None:
        """Meets the other ranks and brings the model to its device; once."""
        if self._wrapper is None:
            self.place.begin()
            self._is_on_cpu = self.device.type == "cpu"
            self.precision = Precision(self.place.precision, self.device.type)
            self.precision.convert(self.whole)
            self._wrapper = self.place.wrap(self.whole)

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.place.device

    def source(self) -> FeatureSource | None:
        """Returns the source of feature rows; None without features."""
        return None if self._features is None else self._features.source

    def hold_features(self, step: int) -> None:
        """Fills the feature table, once."""
        if self._features is not None:
            self._features.hold(self.model, self.device, partial(self.on_event, step=step))

    def _checkpoint_activations(self) -> bool:
        if self.options.compile_mode != "none":
            return False  # a compiled step would ignore it
        return checkpoint_blocks(self.model) > 0

    def _move_features(self, mode: Any) -> bool:
        return self._features is not None and self._features.move_to(mode, self.device)

    # -- steps ----------------------------------------------------------------------------------------------------

    def make_step(
        self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None, clock: StepClock
    ) -> TrainStep:
        """Returns the optimizer step of the model, which marks its phases on the clock.

        Args:
            scaler: of fp16 gradients; None in another precision.
        """
        assert self._wrapper is not None
        ranks = Replicas(self._wrapper) if self.place.size > 1 else Ranks()
        precision = Precision(self.precision.name, self.device.type, scaler)
        computation = Computation(self.model, self._loss, self._prepare, precision, self.device, ranks, self.source)
        step = TrainStep(
            computation, optimizer, self.fallbacks, self.options, totals=self.totals, on_event=self.on_event
        )
        step.passes.mark, step.passes.now_s = clock.mark, clock.now_s
        return step

    def bring(self, delivery: Delivery) -> None:
        """Brings a batch of training to the device. One that does not fit stays on the host, and is moved in
        micro-batches."""
        if self.precision.dtype is not None:
            self._convert(delivery)
        if self._is_on_cpu or delivery.is_on_device:
            return
        self._weigh(delivery)
        try:
            delivery.batch = batches.to_device(delivery.batch, self.device)
        except Exception as error:
            if not self.options.goes_on(is_training=True) or oom.classify(error) is None:
                raise

    def _weigh(self, delivery: Delivery) -> None:
        """Notes the weights of a batch's micro-batches while it is on the host, where that waits for no device."""
        prepare = self._prepare
        if prepare.has_own_weight and delivery.weights is None and not delivery.is_padding:
            sizes = self.micro.sizes(delivery.size)
            delivery.weights = sizes, prepare.weights(delivery, prepare.split(delivery.batch, sizes), sizes)

    def _convert(self, delivery: Delivery) -> None:
        dtype_of = self.precision.dtype_of
        delivery.batch = batches.map_tensors(delivery.batch, lambda tensor: tensor.to(dtype_of(tensor)))

    @contextmanager
    def prefetched(self, loader: Any, ahead: int, *, is_training: bool) -> Iterator[Any]:
        """Yields the loader, or one that copies ``ahead`` of its batches to the device before they are needed."""
        if ahead == 0:
            yield loader
            return

        self.begin()
        more: dict[str, Any] = {"before_move": self._weigh} if is_training else {}
        prefetcher = DevicePrefetcher(
            loader, self.device, ahead, no_room=lambda error: oom.classify(error) is not None, **more
        )
        with closing(prefetcher):
            yield prefetcher

    # -- evaluation -----------------------------------------------------------------------------------------------

    def evaluate(
        self,
        split: str,
        deliveries: Iterable[Delivery],
        step: int,
        look: Callable[[], None] = lambda: None,
    ) -> dict[str, float]:
        """Returns the metrics of a pass over a split, without gradients unless the loss enables them. If memory runs
        out, the pass is repeated in smaller batches.

        Args:
            look: called after each batch.
        """
        # All ranks get the buffers of rank 0, as DDP does before each forward pass. Once a pass: each rank repeats the
        # pass by itself if its memory runs out.
        self.place.send(self.model.buffers())
        while not self._has_passed(split, deliveries, step, look):
            pass
        if self.options.shares_evaluation:  # on the host: tensors would arrive on the device of the rank that sent them
            own = batches.map_tensors(self.evaluation.state(), lambda tensor: tensor.cpu())
            self.evaluation.merge(self.place.gather(own))
        return self.evaluation.compute()

    def _has_passed(self, split: str, deliveries: Iterable[Delivery], step: int, look: Callable[[], None]) -> bool:
        """Passes over a split in evaluation mode; returns False if memory ran out and it must begin again."""
        precision = self.precision
        self.evaluation.reset()
        with in_eval_mode(self.whole), torch.no_grad():
            for delivery in deliveries:
                if precision.dtype is not None:
                    self._convert(delivery)
                with precision.forward():
                    if not self._has_evaluated(split, delivery, step):
                        return False
                del delivery  # frees its device memory while the next batch is fetched
                look()
        return True

    def _has_evaluated(self, split: str, delivery: Delivery, step: int) -> bool:
        """Adds a batch, which may still be on the host, to the metrics. If memory runs out, returns False; from then on
        the largest part of a batch is half as large.

        Raises:
            OutOfMemoryExhausted: a single sample does not fit, or batches may not be halved.
        """
        prepare, evaluation, features = self._prepare_split[split], self.evaluation, self.source()
        sizes = MicroBatches(self._evaluates_at_most or delivery.size).sizes(delivery.size)

        def update() -> None:
            for number, part in enumerate(prepare.split(delivery.batch, sizes)):
                weight = prepare.weight(part, sizes[number]) if evaluation.takes_loss else 0
                batch = prepare(batches.to_device(part, self.device), delivery, number, features)
                evaluation.update(batch, weight, features)

        try:
            failure = oom.attempt(update)[1]
        except Exception as error:
            add_place(error, delivery, split)
            raise
        if failure is None:
            return True
        oom.release()
        self.on_event("oom", step=step, message=failure.message)
        if sizes[0] == 1 or not self.options.goes_on(is_training=False):
            raise OutOfMemoryExhausted(
                f"Out of memory in the {split} split with {counted(sizes[0], 'sample')} at a time: {failure.message} "
                "Next: a smaller workload.eval_batch_size or workload.model, memory.features=dynamic, or a card with "
                "more memory (gpu=...).",
                failure.kind,
            )
        self._evaluates_at_most = sizes[0] // 2
        self.on_event("step_down", step=step, evaluation_batch=self._evaluates_at_most, before=sizes[0])
        return False

    def try_split(self, split: str, deliveries: Iterable[Delivery]) -> dict[str, float]:
        """Returns the metrics of a few batches before training, so that errors show at once. Logs nothing;
        restores buffers and generators."""
        try:
            with put_back(self.whole, self.device, only_buffers=True), logged_to(None):
                return self.evaluate(split, deliveries, 0)
        except Exception as error:
            error.add_note(
                f"in the {split} batches that are tried before training; trainer.sanity_batches=0 tries none"
            )
            raise

    def load_of_rank_0(self, read: Callable[[], Mapping[str, Tensor]]) -> None:
        """Loads weights that rank 0 reads, on all ranks."""
        if self.place.rank == 0:
            self.whole.load_state_dict(read())
        self.place.send(chain(self.model.parameters(), self.model.buffers()))


def misfits(module: nn.Module, state_dict: Mapping[str, Any]) -> list[str]:
    """Returns up to three weights that differ between checkpoint and module, with both shapes."""
    # A module's extra state may be of any type.
    own = {name: tuple(getattr(value, "shape", ())) for name, value in module.state_dict().items()}
    other = {name: tuple(getattr(value, "shape", ())) for name, value in state_dict.items()}
    names = [name for name in own | other if own.get(name) != other.get(name)]
    return [f"{name}: {other.get(name, 'absent')} there, {own.get(name, 'absent')} here" for name in names[:3]]
