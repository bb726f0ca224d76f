"""Derives the planning inputs of each of ``memory.stages``: its configuration, the encoder frozen or trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from wellfed.config.schema import FeatureMode, MemoryStage, RunConfig
from wellfed.errors import ConfigError
from wellfed.plan.run_plan import RunPlan
from wellfed.run.objects.run_objects import RunObjects
from wellfed.train.memory.features import weights_behind
from wellfed.train.memory.step_down import MicroBatches
from wellfed.train.step.feature_table import FeatureStage


def first_stage(config: RunConfig, objects: RunObjects) -> tuple[RunConfig, RunObjects]:
    """Returns configuration and objects for the first stage, unchanged if there are no stages.

    Freezes the model's encoder if a later stage trains it.

    Raises:
        ConfigError: the model's encoder is trained, and the stages don't allow that.
    """
    stages, features = config.memory.stages, objects.features
    if not stages or features is None:  # without features the plan reports stages as a fault
        return config, objects
    if features.trainable and stages[0].features is not FeatureMode.dynamic:
        encoder = tuple(_encoder(stages, objects))
        objects = replace(objects, encoder=encoder, features=replace(features, trainable=False))
    return of_stage(config, objects, stages[0])


def of_stage(config: RunConfig, objects: RunObjects, stage: MemoryStage) -> tuple[RunConfig, RunObjects]:
    """Returns configuration and objects for a stage; trains or freezes the model's encoder from here on."""
    config = replace(config, memory=replace(config.memory, features=stage.features))
    if objects.encoder and objects.features is not None:
        is_trained = stage.features is FeatureMode.dynamic
        train_encoder(objects, is_trained=is_trained)
        objects = replace(objects, features=replace(objects.features, trainable=is_trained))
    return config, objects


def train_encoder(objects: RunObjects, *, is_trained: bool) -> None:
    """Trains or freezes the encoder."""
    for weight in objects.encoder:
        weight.requires_grad_(is_trained)


def planned_stages(config: RunConfig, plan: RunPlan, objects: RunObjects) -> list[FeatureStage]:
    """Returns the planned stages in the order of training."""
    return [
        FeatureStage(
            stage.from_epoch,
            stage.memory.features or "dynamic",
            MicroBatches(stage.memory.micro_batch, config.memory.micro_batch_steps),
            checkpoints=stage.memory.checkpoint_activations,
            trains_encoder=bool(objects.encoder) and stage.memory.features == "dynamic",
        )
        for stage in plan.stages
    ]


def _encoder(stages: Sequence[MemoryStage], objects: RunObjects) -> list[nn.Parameter]:
    """Returns the weights behind the features, which a later stage trains."""
    assert objects.features is not None
    if all(stage.features is not FeatureMode.dynamic for stage in stages):
        problem = "the workload trains the encoder of its features, and no stage computes them anew."
        raise ConfigError.of("memory.stages", problem, "Add a stage with features: dynamic, or freeze the encoder.")
    found = weights_behind(objects.features, objects.model)
    if len(found) == sum(weight.requires_grad for weight in objects.model.parameters()):
        held = f"features={stages[0].features.name} from epoch 0"
        problem = f"{held} leaves nothing to train: all weights are the encoder's."
        raise ConfigError.of("memory.stages", problem, "Set memory.stages=null memory.features=dynamic.")
    return found
