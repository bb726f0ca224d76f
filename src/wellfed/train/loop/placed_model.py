"""Holds a plain model on the device of its rank, for all passes of a run: steps, evaluations, weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from wellfed import batches, generators
from wellfed.batches import Delivery
from wellfed.observe.timing.step_clock import StepClock
from wellfed.train.loop.place import Place, Whole
from wellfed.train.memory import oom
from wellfed.train.plain_model.plain_training import PlainSetup, PlainTraining
from wellfed.train.step.precision import Precision
from wellfed.train.step.replicas import AgreeingReplicas, Ranks, Replicas, Shards
from wellfed.train.step.train_step import TrainStep


class PlacedModel:
    """A plain model on one device, or one of several ranks. All ranks call each method alike."""

    def __init__(self, model: nn.Module, setup: PlainSetup, place: Place, gradient_clip: float | None = None) -> None:
        """``gradient_clip``: maximum norm of all gradients; None = no limit."""
        self.model, self.place, self.plain = model, place, PlainTraining(model, setup)
        self.gradient_clip = gradient_clip
        self.step: TrainStep | None = None
        """Step of the latest `make_step`; set it to None after training, to free the optimizer's state."""
        self.whole = Whole(model)
        self._wrapper: nn.Module | None = None
        self._is_on_cpu = False
        self._precision: Precision
        self._converts = False
        """Batches are converted to another type."""

    def begin(self) -> None:
        """Meets the other ranks and brings the model to its device; once."""
        if self._wrapper is None:
            self.place.begin()
            self._is_on_cpu = self.device.type == "cpu"
            self._precision = Precision(self.place.options.precision, self.device.type)
            self._precision.convert(self.whole)
            self._converts = self._precision.dtype is not None
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

    def hold_features(self, step: int) -> None:
        """Fills the feature table, once."""
        if self.plain.source() is None:
            return
        from wellfed.train.loop.sharding import gathered

        with gathered(self.wrapper) if self.place.is_sharded else nullcontext():
            self.plain.hold_features(self.device, step)

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
        step = self.plain.make_step(optimizer, precision, self.device, self._ranks(), self.gradient_clip)
        step.passes.mark, step.passes.now_s = clock.mark, clock.now_s
        self.step = step
        return step

    def _ranks(self) -> Ranks:
        if self.place.is_sharded:
            return Shards(self.wrapper, self.device)
        if not self.place.is_replicated:
            return Ranks()
        if self.plain.options.on_oom != "retry":
            return Replicas(self.wrapper, self.device)
        weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        return AgreeingReplicas(self.wrapper, self.device, weights)

    def bring(self, delivery: Delivery, step: TrainStep) -> None:
        """Brings a batch of training to the device. One that does not fit stays on the host, and is moved in
        micro-batches."""
        if self._converts:
            self._convert(delivery)
        if self._is_on_cpu or delivery.is_on_device:
            return
        step.passes.weigh(delivery)  # on the host, where that waits for nothing
        try:
            delivery.batch = batches.to_device(delivery.batch, self.device)
        except Exception as error:
            if not self.plain.options.goes_on(is_training=True) or oom.classify(error) is None:
                raise

    def _convert(self, delivery: Delivery) -> None:
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
        evaluating = self.plain.evaluating
        self.take_all(split, deliveries, step, look)
        while evaluating.must_repeat:
            self.take_all(split, deliveries, step, look)
        return evaluating.end()

    def take_all(
        self, split: str, deliveries: Iterable[Delivery], step: int, look: Callable[[], None] = lambda: None
    ) -> None:
        """Passes over a split once, in evaluation mode."""
        evaluating, source = self.plain.evaluating, self.plain.source()
        take: Callable[..., Any] = evaluating.take
        if self.place.is_sharded:
            take = partial(self.wrapper, evaluating.take)
        if self.place.is_replicated:  # as DDP does before each forward pass
            self.place.send(self.model.buffers())
        modes = [(part, part.training) for part in self.model.modules()]
        self.whole.eval()
        evaluating.begin()
        try:
            with torch.no_grad():
                for delivery in deliveries:
                    if self._converts:
                        self._convert(delivery)
                    with self._precision.forward() or nullcontext():
                        take(split, delivery, source, self.device, step)
                    del delivery  # frees its device memory while the next batch is fetched
                    look()
        finally:
            for part, mode in modes:
                part.training = mode

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

    @contextmanager
    def put_back(self, *, only_buffers: bool = False) -> Iterator[None]:
        """Restores weights, buffers, modes and generators on exit. Gradients are lost."""
        named = self.whole.named_buffers() if only_buffers else self._tensors()
        before = {name: value.detach().to("cpu", copy=True) for name, value in named}
        modes = [(part, part.training) for part in self.whole.modules()]
        drawn = generators.state(self.device)
        self.whole.zero_grad()
        try:
            yield
        finally:
            self.whole.zero_grad()
            with torch.no_grad():
                for name, value in self._tensors():
                    if name in before and before[name].shape == value.shape:
                        value.copy_(before[name])
            for part, mode in modes:
                part.training = mode
            generators.restore(drawn, self.device)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields weights and buffers by name, except lazy ones."""
        named = chain(self.whole.named_parameters(), self.whole.named_buffers())
        return ((name, value) for name, value in named if not is_lazy(value))


def misfits(module: nn.Module, state_dict: Mapping[str, Any]) -> list[str]:
    """Returns up to three weights that differ between checkpoint and module, with both shapes."""
    # A module's extra state may be of any type.
    own = {name: tuple(getattr(value, "shape", ())) for name, value in module.state_dict().items()}
    other = {name: tuple(getattr(value, "shape", ())) for name, value in state_dict.items()}
    names = [name for name in own | other if own.get(name) != other.get(name)]
    return [f"{name}: {other.get(name, 'absent')} there, {own.get(name, 'absent')} here" for name in names[:3]]
