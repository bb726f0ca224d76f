"""What a run asks for that a user's own LightningModule does by itself, or can't be made to do."""

from __future__ import annotations

from wellfed.config.schema import Compile, RunConfig
from wellfed.errors import Fault
from wellfed.planning.planned import ModelFacts


def guest_faults(config: RunConfig, model: ModelFacts, warnings: list[str]) -> list[Fault]:
    """What can't be; what is not used goes into ``warnings``."""
    if not model.is_lightning_module:
        return []
    faults = []
    if config.memory.micro_batch_steps is not None:
        faults.append(
            Fault(
                "memory.micro_batch_steps",
                f"{config.memory.micro_batch_steps} would split a step, and a LightningModule runs its own step on "
                "whole batches.",
                "Set memory.micro_batch_steps=null, or bring a plain nn.Module with loss(batch).",
            )
        )
    if model.steps_by_hand:
        faults += _by_hand(config)
    if config.workload.optimizer is not None:
        warnings.append(
            "workload.optimizer is not used: a LightningModule configures its own. Set workload.optimizer=null."
        )
    if config.memory.plateau_frac is not None:
        warnings.append(
            f"memory.plateau_frac={config.memory.plateau_frac:g} is not used: a LightningModule runs its own step on "
            "whole batches."
        )
    return faults


def _by_hand(config: RunConfig) -> list[Fault]:
    """Manual optimization: steps are the module's own affair."""
    why = "this LightningModule steps by hand (automatic_optimization=False)"
    faults = []
    if config.gpu.compile is not Compile.none:
        faults.append(
            Fault(
                "gpu.compile",
                f"{config.gpu.compile.value} compiles training_step, and {why}.",
                "Set gpu.compile=none, and compile its networks in __init__: self.net = torch.compile(self.net).",
            )
        )
    if config.trainer.gradient_clip is not None:
        faults.append(
            Fault(
                "trainer.gradient_clip",
                f"{config.trainer.gradient_clip:g} clips before an optimizer step, and {why}.",
                "Set trainer.gradient_clip=null, and call self.clip_gradients in training_step.",
            )
        )
    return faults
