"""Holds a plain model with everything that its steps and evaluations need: data, micro-batches, features, metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from wellfed.contract import FEATURE_MODES, Evaluation, Features, FeatureSource
from wellfed.record.entries import OnEvent
from wellfed.train.memory.checkpointing import checkpoint_blocks, is_checkpointed
from wellfed.train.memory.features import FeatureTable
from wellfed.train.memory.step_down import Fallback, Fallbacks, MicroBatches
from wellfed.train.plain_model.evaluating import Evaluating
from wellfed.train.plain_model.scheduling import Scheduling
from wellfed.train.plain_model.split_metrics import SplitMetrics
from wellfed.train.step.compiled import Loss
from wellfed.train.step.micro_batches import Preparation
from wellfed.train.step.precision import Precision
from wellfed.train.step.replicas import Ranks
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


class PlainTraining:
    """A plain model that offers ``loss(batch)`` (see `wellfed.contract`), with the state of its training."""

    def __init__(self, model: nn.Module, setup: PlainSetup) -> None:
        options = setup.options
        self.model, self.options, self.micro, self.totals = model, options, setup.micro, Totals()
        self.on_event, self.scheduling = setup.on_event, setup.scheduling
        self.make_optimizer, self.lr_factor = setup.make_optimizer, setup.lr_factor
        self.fallbacks, self._device = Fallbacks(self.micro, self._ways_down()), torch.device("cpu")
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
        on_failure = setup.on_event
        self._loss = Loss(model, options.compile_mode, lambda message: on_failure("compile_failed", message=message))
        self._lowered: Mapping[str, int] = {}
        """Planned micro-batch of the checkpoint's run, and the smaller one that it continued with."""

    def _ways_down(self) -> list[Fallback]:
        """Returns the fallbacks after micro-batches of one sample. They do not change what is learned."""

        def checkpoint_activations() -> bool:
            if self.options.compile_mode != "none" or is_checkpointed(self.model):
                return False  # a compiled step would ignore it
            return checkpoint_blocks(self.model) > 0

        def move_features(mode: Any) -> bool:
            return self._features is not None and self._features.move_to(mode, self._device)

        return [
            Fallback("memory.checkpoint_activations=true", checkpoint_activations),
            *(
                Fallback(f"memory.features={mode}", partial(move_features, mode), frees_held=True)
                for mode in FEATURE_MODES[1:]
            ),
        ]

    def make_step(
        self,
        optimizer: torch.optim.Optimizer,
        precision: Precision,
        device: torch.device,
        ranks: Ranks,
        gradient_clip: float | None,
    ) -> TrainStep:
        """Returns the optimizer step of this model."""
        computation = Computation(
            self.model, self._loss, self._prepare, precision, device, ranks=ranks, features=self.source
        )
        return TrainStep(
            computation,
            optimizer,
            self.fallbacks,
            replace(self.options, gradient_clip=gradient_clip),
            totals=self.totals,
            on_event=self.on_event,
        )

    # -- features -------------------------------------------------------------------------------------------------

    def source(self) -> FeatureSource | None:
        """Returns the source of feature rows; None without features."""
        return None if self._features is None else self._features.source

    def hold_features(self, device: torch.device, step: int) -> None:
        """Fills the feature table, once. The model must be on its device with its weights."""
        self._device = device
        if self._features is not None:
            self._features.hold(self.model, device, partial(self.on_event, step=step))

    # -- adapting -------------------------------------------------------------------------------------------------

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
