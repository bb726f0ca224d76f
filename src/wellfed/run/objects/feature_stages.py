"""Makes of ``memory.stages`` what each stage is planned with: its configuration, and the encoder frozen or trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from wellfed.config.schema import FeatureMode, MemoryStage, RunConfig
from wellfed.errors import ConfigError
from wellfed.plan.run_plan import RunPlan
from wellfed.run.objects.assemble import Parts
from wellfed.train.memory.fallbacks import MicroBatches
from wellfed.train.memory.features import weights_behind
from wellfed.train.step.feature_table import FeatureStage


def first_stage(config: RunConfig, parts: Parts) -> tuple[RunConfig, Parts]:
    """Configuration and parts as the first stage has them; as they are where there are no stages.

    The model's encoder is frozen, if a later stage trains it.

    Raises:
        ConfigError: the model's encoder is trained, and the stages don't let it.
    """
    stages, features = config.memory.stages, parts.features
    if not stages or features is None:  # of a workload without them the plan tells
        return config, parts
    if features.trainable and stages[0].features is not FeatureMode.dynamic:
        parts = replace(parts, encoder=tuple(_encoder(stages, parts)), features=replace(features, trainable=False))
    return of_stage(config, parts, stages[0])


def of_stage(config: RunConfig, parts: Parts, stage: MemoryStage) -> tuple[RunConfig, Parts]:
    """Configuration and parts as a stage has them; the model's encoder is trained or frozen from here on."""
    config = replace(config, memory=replace(config.memory, features=stage.features))
    if parts.encoder and parts.features is not None:
        is_trained = stage.features is FeatureMode.dynamic
        train_encoder(parts, is_trained=is_trained)
        parts = replace(parts, features=replace(parts.features, trainable=is_trained))
    return config, parts


def train_encoder(parts: Parts, *, is_trained: bool) -> None:
    """Let gradients into the encoder that a stage trains, or keep them out."""
    for weight in parts.encoder:
        weight.requires_grad_(is_trained)


def planned_stages(config: RunConfig, plan: RunPlan, parts: Parts) -> list[FeatureStage]:
    """The stages as training goes through them."""
    return [
        FeatureStage(
            stage.from_epoch,
            stage.memory.features or "dynamic",
            MicroBatches(stage.memory.micro_batch, config.memory.micro_batch_steps),
            checkpoints=stage.memory.checkpoint_activations,
            trains_encoder=bool(parts.encoder) and stage.memory.features == "dynamic",
        )
        for stage in plan.stages
    ]


def _encoder(stages: Sequence[MemoryStage], parts: Parts) -> list[nn.Parameter]:
    assert parts.features is not None
    if all(stage.features is not FeatureMode.dynamic for stage in stages):
        problem = "the workload trains the encoder of its features, and no stage computes them anew."
        raise ConfigError.of("memory.stages", problem, "Add a stage with features: dynamic, or freeze the encoder.")
    found = weights_behind(parts.features, parts.model)
    if len(found) == sum(weight.requires_grad for weight in parts.model.parameters()):
        held = f"features={stages[0].features.name} from epoch 0"
        problem = f"{held} leaves nothing to train: all weights are the encoder's."
        raise ConfigError.of("memory.stages", problem, "Set memory.stages=null memory.features=dynamic.")
    return found
