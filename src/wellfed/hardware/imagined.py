"""Adds cards that this machine does not have, to plan for."""

from __future__ import annotations

from dataclasses import replace

from wellfed.hardware.facts import GpuFacts, MachineFacts
from wellfed.hardware.profiles import PROFILES

CAPABILITY = "8.0"
"""Taken where no card tells: from 8.0 on there is bf16, which all cards of the last years have."""


def with_cards(
    facts: MachineFacts, profile: str, memory_gib: float | None, devices: int
) -> tuple[MachineFacts, str | None]:
    """The machine with as many cards as a plan asks for, and a sentence about those that are not there.

    Cards that are there and large enough stay. Without a profile or a budget there is nothing to imagine a card by,
    and the machine stays as it is.
    """
    named, real = PROFILES.get(profile), facts.training_gpus
    needed_gib = memory_gib if memory_gib is not None else named.budget_gib if named else 0.0
    if profile == "cpu" or not (needed_gib or real):
        return facts, None
    if real and (real[0].memory_gib or needed_gib) >= needed_gib:
        if len(real) >= devices:
            return facts, None
        model, what = real[0], real[0].describe()
        there = f"this machine has {len(real)}"
    else:
        size_gib = named.nominal_gib if named and needed_gib == named.budget_gib else needed_gib
        model = GpuFacts(0, None, "an assumed GPU", size_gib, CAPABILITY)
        what, there = f"a card of {size_gib:g} GiB and capability {CAPABILITY}", "not in this machine"
    cards = tuple(
        replace(model, index=index, uuid=None, free_gib=model.memory_gib, nvml_index=None, holders=())
        for index in range(devices)
    )
    times = f"{devices} x " if devices > 1 else ""
    return replace(facts, gpus=cards, torch_problem=None, warnings=()), f"Planned for {times}{what}; {there}."
