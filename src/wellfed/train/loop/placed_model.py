"""Holds a plain model on the device of its rank, with everything that its steps and evaluations need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from wellfed import batches
from wellfed.batches import Delivery
from wellfed.contract import FEATURE_MODES, Evaluation, Features, FeatureSource
from wellfed.observe.timing.step_clock import StepClock
from wellfed.record.entries import OnEvent
from wellfed.train.loop import sharding
from wellfed.train.loop.place import Place, Whole
from wellfed.train.memory import oom
from wellfed.train.memory.checkpointing import checkpoint_blocks, is_checkpointed
from wellfed.train.memory.features import FeatureTable, in_eval_mode
from wellfed.train.memory.step_down import Fallback, Fallbacks, MicroBatches
from wellfed.train.plain_model.evaluating import Evaluating
from wellfed.train.plain_model.scheduling import Scheduling
from wellfed.train.plain_model.split_metrics import SplitMetrics
from wellfed.train.step.compiled import Loss
from wellfed.train.step.micro_batches import Preparation
from wellfed.train.step.precision import Precision
from wellfed.train.step.replicas import Ranks, Replicas, Shards
from wellfed.train.step.step_passes import Computation
from wellfed.train.step.totals import Totals
from wellfed.train.step.train_step import StepOptions, TrainStep


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
        self.evaluating = Evaluating(
            self.evaluation,
            {split: prepare(data) for split, data in eval_data.items()},
            may_halve=options.goes_on(is_training=False),
            on_event=on_event,
            shares=options.shares_evaluation,
        )
        mode, may_change = options.feature_mode or "dynamic", options.goes_on(is_training=True)
        self._features = None if features is None else FeatureTable(features, mode, may_change=may_change)
        modes = [] if self._features is None else FEATURE_MODES[1:]
        self.fallbacks = Fallbacks(
            micro,
            [
                Fallback("memory.checkpoint_activations=true", self._checkpoint_activations),
                *(
                    Fallback(f"memory.features={mode}", partial(self._move_features, mode), frees_held=True)
                    for mode in modes
                ),
            ],
        )
        self._loss = Loss(model, options.compile_mode)
        self.step: TrainStep | None = None
        """Step of the latest `make_step`; set it to None after training, to free the optimizer's state."""
        self.whole = Whole(model)
        self._wrapper: nn.Module | None = None
        self._is_on_cpu = False
        self._precision: Precision

    def begin(self) -> None:
        """Meets the other ranks and brings the model to its device; once."""
        if self._wrapper is None:
            self.place.begin()
            self._is_on_cpu = self.device.type == "cpu"
            self._precision = Precision(self.place.options.precision, self.device.type)
            self._precision.convert(self.whole)
            self._wrapper = self.place.wrap(self.whole)

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.place.device

    @property
    def wrapper(self) -> Any:
        """The model, within DDP or FSDP if there are several ranks."""
        assert self._wrapper is not None
        return self._wrapper

    def source(self) -> FeatureSource | None:
        """Returns the source of feature rows; None without features."""
        return None if self._features is None else self._features.source

    def hold_features(self, step: int) -> None:
        """Fills the feature table, once."""
        if self._features is not None:
            with sharding.gathered(self.wrapper) if self.place.is_sharded else nullcontext():
                self._features.hold(self.model, self.device, partial(self.on_event, step=step))

    def _checkpoint_activations(self) -> bool:
        if self.options.compile_mode != "none" or is_checkpointed(self.model):
            return False  # a compiled step would ignore it
        return checkpoint_blocks(self.model) > 0

    def _move_features(self, mode: Any) -> bool:
        return self._features is not None and self._features.move_to(mode, self.device)

    # -- steps ----------------------------------------------------------------------------------------------------

    def make_scaler(self) -> torch.amp.GradScaler | None:
        """Returns the scaler of fp16 gradients; None in another precision."""
        if self._precision.name != "16-mixed":
            return None
        return sharding.sharded_scaler() if self.place.is_sharded else torch.amp.GradScaler(self.device.type)

    def make_step(
        self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None, clock: StepClock
    ) -> TrainStep:
        """Returns the optimizer step of the model, which marks its phases on the clock."""
        precision = Precision(self._precision.name, self.device.type, scaler)
        computation = Computation(
            self.model, self._loss, self._prepare, precision, self.device, self._ranks(), self.source
        )
        step = TrainStep(
            computation, optimizer, self.fallbacks, self.options, totals=self.totals, on_event=self.on_event
        )
        step.passes.mark, step.passes.now_s = clock.mark, clock.now_s
        self.step = step
        return step

    def _ranks(self) -> Ranks:
        if self.place.is_sharded:
            return Shards(self.wrapper)
        return Replicas(self.wrapper) if self.place.is_replicated else Ranks()

    def bring(self, delivery: Delivery, step: TrainStep) -> None:
        """Brings a batch of training to the device. One that does not fit stays on the host, and is moved in
        micro-batches."""
        if self._precision.dtype is not None:
            self._convert(delivery)
        if self._is_on_cpu or delivery.is_on_device:
            return
        step.passes.weigh(delivery)  # on the host, where that waits for nothing
        try:
            delivery.batch = batches.to_device(delivery.batch, self.device)
        except Exception as error:
            if not self.options.goes_on(is_training=True) or oom.classify(error) is None:
                raise

    def _convert(self, delivery: Delivery) -> None:
        dtype_of = self._precision.dtype_of
        delivery.batch = batches.map_tensors(delivery.batch, lambda tensor: tensor.to(dtype_of(tensor)))

    # -- evaluation -----------------------------------------------------------------------------------------------

    def evaluate(
        self,
        split: str,
        deliveries: Iterable[Delivery],
        step: int,
        look: Callable[[], None] = lambda: None,
        *,
        merges: bool = True,
    ) -> dict[str, float]:
        """Returns the metrics of a pass over a split, without gradients unless the loss enables them. If memory runs
        out, the pass is repeated in smaller batches.

        Args:
            look: called after each batch.
            merges: merge the metrics of all ranks, if they share the batches.
        """
        # All ranks get the buffers of rank 0, as DDP does before each forward pass. Once a pass: each rank repeats the
        # pass by itself if its memory runs out.
        if self.place.is_replicated:
            self.place.send(self.model.buffers())
        self._take_all(split, deliveries, step, look)
        while self.evaluating.must_repeat:
            self._take_all(split, deliveries, step, look)
        return self.evaluating.end() if merges else self.evaluation.compute()

    def _take_all(self, split: str, deliveries: Iterable[Delivery], step: int, look: Callable[[], None]) -> None:
        """Passes over a split once, in evaluation mode."""
        evaluating, source = self.evaluating, self.source()
        take: Callable[..., Any] = evaluating.take
        if self.place.is_sharded:
            take = partial(self.wrapper, evaluating.take)
        evaluating.begin()
        with in_eval_mode(self.whole), torch.no_grad():
            for delivery in deliveries:
                if self._precision.dtype is not None:
                    self._convert(delivery)
                with self._precision.forward() or nullcontext():
                    take(split, delivery, source, self.device, step)
                del delivery  # frees its device memory while the next batch is fetched
                look()

    # -- weights --------------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, Tensor]:
        """Returns all weights and buffers by name; on rank 0 alone if the model is sharded."""
        return sharding.whole_weights(self.wrapper) if self.place.is_sharded else self.whole.state_dict()

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Loads the weights of a checkpoint, on each rank."""
        if self.place.is_sharded:
            sharding.load_whole_weights(self.wrapper, weights)
        else:
            self.whole.load_state_dict(weights)

    def load_of_rank_0(self, read: Callable[[], Mapping[str, Tensor]]) -> None:
        """Loads weights that rank 0 reads; ranks of a sharded model all read them."""
        if self.place.is_sharded or self.place.rank == 0:
            self.load(read())
        if self.place.is_replicated:
            self.place.send(chain(self.model.parameters(), self.model.buffers()))

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Returns the state of an optimizer of this model; on rank 0 alone if the model is sharded."""
        if self.place.is_sharded:
            return sharding.whole_optimizer_state(self.wrapper, optimizer)
        return optimizer.state_dict()

    def load_optimizer_state(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any], trained_before: list[str]
    ) -> None:
        """Loads the state of an optimizer, on each rank. Weights that were frozen then have none yet."""
        now, has_groups = self.trained(), callable(getattr(self.model, "param_groups", None))
        if not has_groups and set(trained_before) < set(now):
            state["state"] = {now.index(trained_before[number]): each for number, each in state["state"].items()}
            (group,) = state["param_groups"]
            group["params"] = list(range(len(now)))
        if self.place.is_sharded:
            sharding.load_whole_optimizer_state(self.wrapper, optimizer, state)
        else:
            optimizer.load_state_dict(state)
        if optimizer.defaults.get("foreach") is False:  # a restart's change, which the checkpoint does not have
            for group in optimizer.param_groups:
                group["foreach"] = False

    def trained(self) -> list[str]:
        """Returns the names of the weights that are trained."""
        return [name for name, weight in self.model.named_parameters() if weight.requires_grad]

    @contextmanager
    def only_timed(self) -> Iterator[None]:
        """Suppresses events, metrics and adaptation to out-of-memory errors within the block."""
        kept = self.options, self.totals, self.on_event
        self.options, self.totals = replace(self.options, may_adapt=False), Totals()
        self.on_event = lambda kind, **facts: None
        try:
            with self.unscheduled():
                yield
        finally:
            self.options, self.totals, self.on_event = kept

    @contextmanager
    def unscheduled(self) -> Iterator[None]:
        """Removes the user's scheduler within the block, which has no epochs and no validations."""
        kept, self.scheduling = self.scheduling, None
        try:
            yield
        finally:
            self.scheduling = kept


def misfits(module: nn.Module, state_dict: Mapping[str, Any]) -> list[str]:
    """Returns up to three weights that differ between checkpoint and module, with both shapes."""
    # A module's extra state may be of any type.
    own = {name: tuple(getattr(value, "shape", ())) for name, value in module.state_dict().items()}
    other = {name: tuple(getattr(value, "shape", ())) for name, value in state_dict.items()}
    names = [name for name in own | other if own.get(name) != other.get(name)]
    return [f"{name}: {other.get(name, 'absent')} there, {own.get(name, 'absent')} here" for name in names[:3]]
