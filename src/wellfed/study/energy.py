"""Refuses a study for samples per joule where energy can't be measured."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from wellfed.command_line import command
from wellfed.config.schema import Accelerator, RunConfig, SweepObjective
from wellfed.errors import ConfigError, Fault
from wellfed.observe.hardware.detect import machine
from wellfed.observe.hardware.facts import MachineFacts
from wellfed.observe.nvml.readings import OpenDevice, Power
from wellfed.observe.nvml.session import NvmlError, NvmlSession, within

_DEADLINE_S = 10


def check_energy(config: RunConfig, axes: Collection[str]) -> None:
    """Checks that the objective can be measured; ``axes`` are the knobs in which points differ.

    Raises:
        ConfigError: the objective needs energy, which trials could not measure.
    """
    if config.sweep.objective is not SweepObjective.samples_per_joule:
        return
    if not config.telemetry.enabled:
        problem, way_out = "nothing is watched with telemetry.enabled=false.", "Set telemetry.enabled=true"
    elif config.trainer.accelerator is Accelerator.cpu and "trainer.accelerator" not in axes:
        problem, way_out = "nothing here measures the energy of a processor.", "Set trainer.accelerator=gpu"
    elif (reason := _missing(machine())) is not None:
        problem, way_out = f"energy can't be measured here: {reason}.", f"{command('doctor')} says more"
    else:
        return
    objective = config.sweep.objective.value
    raise ConfigError([Fault(f"sweep.objective={objective}", problem, f"{way_out}, or sweep.objective=samples_per_s.")])


def _missing(facts: MachineFacts) -> str | None:
    """Returns why a card's energy can't be read; None if that of all can."""
    if facts.nvml_problem is not None:
        return f"NVML: {facts.nvml_problem}"

    def read_power(uuid: str) -> None:
        device = OpenDevice(uuid)
        with NvmlSession() as nvml:
            device.open(nvml)
            Power(device).read()

    for gpu in facts.gpus:
        try:
            if gpu.uuid is not None:
                within(_DEADLINE_S, partial(read_power, gpu.uuid))
        except NvmlError as error:
            return f"{gpu.name} tells neither energy nor power ({error.reason})"
    return None
