"""Holds a plain model on the device of its rank, with everything that its steps and evaluations need."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
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

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlainSetup:
    """Data, options and metrics that a plain model is trained and evaluated with."""

    train_data: Any
    eval_data: Mapping[str, Any]
    micro: MicroBatches
    options: StepOptions
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    lr_factor: Callable[[int], float]
    """Factor on the learning rate by step."""
    on_event: OnEvent
    scheduling: Scheduling | None = None
    evaluation: Evaluation | Any | None = None
    metrics: Any = None
    features: Features | None = None


class PlacedModel:
    """A plain model on one device, or one of several ranks, with its data, micro-batches, features and metrics.

    The model offers ``loss(batch)`` (see `wellfed.contract`). All ranks call each method alike.
    """

    def __init__(self, model: nn.Module, setup: PlainSetup, place: Place) -> None:
        options = setup.options
        self.model, self.place, self.options = model, place, options
        self.micro, self.totals, self.on_event = setup.micro, Totals(), setup.on_event
        self.make_optimizer, self.lr_factor, self.scheduling = setup.make_optimizer, setup.lr_factor, setup.scheduling
        self.fallbacks = Fallbacks(self.micro, self._ways_down())
        prepare = partial(Preparation, seed=options.seed, model=model)
        self._prepare = prepare(setup.train_data)
        self.evaluation = SplitMetrics(model, setup.evaluation, setup.metrics)
        self.evaluating = Evaluating(
            model,
            self.evaluation,
            {split: prepare(data) for split, data in setup.eval_data.items()},
            may_halve=options.goes_on(is_training=False),
            on_event=setup.on_event,
            shares=options.shares_evaluation,
        )
        self._features: FeatureTable | None = None
        if setup.features is not None:
            mode = options.feature_mode or "dynamic"
            self._features = FeatureTable(setup.features, mode, may_change=options.goes_on(is_training=True))
        self._loss = Loss(
            model, options.compile_mode, lambda message: setup.on_event("compile_failed", message=message)
        )
        self._lowered: Mapping[str, int] = {}
        """Planned micro-batch of the checkpoint's run, and the smaller one that it continued with."""
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
        if self._features is None:
            return
        from wellfed.train.loop.sharding import gathered

        with gathered(self.wrapper) if self.place.is_sharded else nullcontext():
            self._features.hold(self.model, self.device, partial(self.on_event, step=step))

    def _ways_down(self) -> list[Fallback]:
        """Returns the fallbacks after micro-batches of one sample. They do not change what is learned."""

        def checkpoint_activations() -> bool:
            if self.options.compile_mode != "none" or is_checkpointed(self.model):
                return False  # a compiled step would ignore it
            return checkpoint_blocks(self.model) > 0

        def move_features(mode: Any) -> bool:
            return self._features is not None and self._features.move_to(mode, self.device)

        return [
            Fallback("memory.checkpoint_activations=true", checkpoint_activations),
            *(
                Fallback(f"memory.features={mode}", partial(move_features, mode), frees_held=True)
                for mode in FEATURE_MODES[1:]
            ),
        ]

    # -- steps ----------------------------------------------------------------------------------------------------

    def make_scaler(self) -> torch.amp.GradScaler | None:
        """Returns the scaler of fp16 gradients; None in another precision."""
        if self._precision.name != "16-mixed":
            return None
        if not self.place.is_sharded:
            return torch.amp.GradScaler(self.device.type)
        from wellfed.train.loop.sharding import sharded_scaler

        return sharded_scaler()

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
        if self._precision.dtype is None:
            return
        dtype_of = self._precision.dtype_of
        delivery.batch = batches.map_tensors(delivery.batch, lambda tensor: tensor.to(dtype_of(tensor)))

    # -- evaluation -----------------------------------------------------------------------------------------------

    def evaluate(
        self, split: str, deliveries: Iterable[Delivery], step: int, look: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """Returns the metrics of a pass over a split, without gradients unless the loss enables them. If memory runs
        out, the pass is repeated in smaller batches.

        Args:
            look: called after each batch.
        """
        evaluating = self.evaluating
        self.send_buffers()
        self.take_all(split, deliveries, step, look)
        while evaluating.must_repeat:
            self.take_all(split, deliveries, step, look)
        return evaluating.end()

    def send_buffers(self) -> None:
        """Gives all ranks the buffers of rank 0, as DDP does before each forward pass. Once a pass, on all ranks alike:
        each repeats the pass by itself if its memory runs out."""
        if self.place.is_replicated:
            self.place.send(self.model.buffers())

    def take_all(
        self, split: str, deliveries: Iterable[Delivery], step: int, look: Callable[[], None] = lambda: None
    ) -> None:
        """Passes over a split once, in evaluation mode."""
        evaluating, source = self.evaluating, self.source()
        take: Callable[..., Any] = evaluating.take
        if self.place.is_sharded:
            take = partial(self.wrapper, evaluating.take)
        evaluating.begin()
        with in_eval_mode(self.whole), torch.no_grad():
            for delivery in deliveries:
                self._convert(delivery)
                with self._precision.forward() or nullcontext():
                    take(split, delivery, source, self.device, step)
                del delivery  # frees its device memory while the next batch is fetched
                look()

    # -- weights --------------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, Tensor]:
        """Returns all weights and buffers by name; on rank 0 alone if the model is sharded."""
        if not self.place.is_sharded:
            return self.whole.state_dict()
        from wellfed.train.loop.sharding import whole_weights

        return whole_weights(self.wrapper)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Loads the weights of a checkpoint, on each rank."""
        if not self.place.is_sharded:
            self.whole.load_state_dict(weights)
            return
        from wellfed.train.loop.sharding import load_whole_weights

        load_whole_weights(self.wrapper, weights)

    def load_of_rank_0(self, read: Callable[[], Mapping[str, Tensor]]) -> None:
        """Loads weights that rank 0 reads; ranks of a sharded model all read them."""
        if self.place.is_sharded or self.place.rank == 0:
            self.load(read())
        if self.place.is_replicated:
            self.place.send(chain(self.model.parameters(), self.model.buffers()))

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Returns the state of an optimizer of this model; on rank 0 alone if the model is sharded."""
        if not self.place.is_sharded:
            return optimizer.state_dict()
        from wellfed.train.loop.sharding import whole_optimizer_state

        return whole_optimizer_state(self.wrapper, optimizer)

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Loads the state of an optimizer, on each rank."""
        if self.place.is_sharded:
            from wellfed.train.loop.sharding import load_whole_optimizer_state

            load_whole_optimizer_state(self.wrapper, optimizer, state)
        else:
            optimizer.load_state_dict(dict(state))
        if optimizer.defaults.get("foreach") is False:  # a restart's change, which the checkpoint does not have
            for group in optimizer.param_groups:
                group["foreach"] = False

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def resume_lowered(self) -> None:
        """Continues with the smaller micro-batch of the run that wrote the checkpoint, if the plan is the same."""
        if self._lowered.get("planned") == self.micro.size and self.micro.go_on_with(self._lowered["size"]):
            _LOG.warning(
                "Going on with micro-batches of %d: the run that wrote the checkpoint ran out of memory with more.",
                self.micro.size,
            )

    def save_to(self, checkpoint: dict[str, Any], mean_of_ranks: Callable[[Tensor], Tensor] | None) -> None:
        """Adds the lowered micro-batch and the running totals to a checkpoint."""
        if len(self.micro.tried) > 1:  # sums of gradients over other micro-batches differ in the last bits
            checkpoint["micro_batch"] = {"planned": self.micro.tried[0], "size": self.micro.size}
        checkpoint["totals"] = self.totals.state_dict(mean_of_ranks)
        checkpoint["trained"] = self._trained()

    def load_from(self, checkpoint: Mapping[str, Any]) -> None:
        """Restores what `save_to` has added to a checkpoint."""
        self._lowered = dict(checkpoint.get("micro_batch", {}))
        if "totals" in checkpoint:
            self.totals.load_state_dict(checkpoint["totals"])
        self._add_unfrozen(checkpoint)

    def _trained(self) -> list[str]:
        return [name for name, weight in self.model.named_parameters() if weight.requires_grad]

    def _add_unfrozen(self, checkpoint: Mapping[str, Any]) -> None:
        """Adds weights that were frozen in the checkpoint's run to its optimizer's state, without a state of theirs."""
        before, now = checkpoint.get("trained", []), self._trained()
        has_groups = callable(getattr(self.model, "param_groups", None))
        if has_groups or not set(before) < set(now) or not checkpoint.get("optimizer_states"):
            return
        (optimizer,) = checkpoint["optimizer_states"]
        (group,) = optimizer["param_groups"]
        optimizer["state"] = {now.index(before[number]): state for number, state in optimizer["state"].items()}
        group["params"] = list(range(len(now)))

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
