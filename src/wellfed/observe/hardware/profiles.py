"""Decides a card's profile, the memory budget of a run, and its precision. Also plans for cards not in this machine."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from wellfed.errors import Fault
from wellfed.observe.machine_facts import GpuFacts, MachineFacts

BUDGET_FRAC = 0.9
"""Share of a card's memory that a run plans with. CUDA's context, fragmentation and workspaces need the rest."""


@dataclass(frozen=True)
class Profile:
    """A class of cards, as ``gpu=`` names it."""

    name: str
    nominal_gib: float
    below_gib: float
    """Exclusive upper limit on card memory. The profile before gives the lower limit."""

    @property
    def budget_gib(self) -> float:
        """Memory that a run with this profile plans for, on any card."""
        return round(BUDGET_FRAC * self.nominal_gib, 3)


PROFILES: Mapping[str, Profile] = {
    "8gb": Profile("8gb", 8, 14.5),  # 16 GB cards show 14.6 (T4) to 15.9 GiB
    "16gb": Profile("16gb", 16, 22),
    "24gb": Profile("24gb", 24, 75),  # an 80 GB card shows 79.2 GiB
    "80gb": Profile("80gb", 80, float("inf")),
}
ASSUMED_CAPABILITY = "8.0"
"""Assumed where no card gives its capability. From 8.0 on, cards support bf16."""

_NO_TENSOR_CORES = re.compile(r"GTX 16\d\d|\bMX[45]50\b|\bT(400|500|550|600|1000|1200|2000)\b")
"""Cards of capability 7.5 without tensor cores, by their chips TU116 and TU117 (GTX 16 series and its siblings)."""


@dataclass(frozen=True)
class Budget:
    """GPU memory that a run may plan with."""

    budget_gib: float | None
    """None if training on the CPU and no card was named."""
    profile: str
    cap: bool
    """Whether the allocator is limited to the budget (``torch.cuda`` memory fraction)."""
    because: str
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class PrecisionChoice:
    """A precision in Lightning's spelling."""

    precision: str
    because: str


def pick_profile(card_total_gib: float) -> Profile:
    """Returns the largest profile that fits a card of this size."""
    return next(profile for profile in PROFILES.values() if card_total_gib < profile.below_gib)


def resolve_budget(
    profile_name: str,
    memory_gib: float | None,
    enforce: bool | None,
    facts: MachineFacts,
    *,
    num_devices: int = 1,
) -> Budget:
    """Returns the memory that a run plans with, per device.

    Args:
        profile_name: value of ``gpu=``: auto, cpu, a key of PROFILES, or a user's own option.
        memory_gib: knob gpu.memory_gib; None = the profile's budget, or what the card has.
        enforce: knob gpu.enforce; None = limit the allocator if a budget was named and the card is larger.
        num_devices: cards used. The one with the least memory decides.
    """
    if profile_name == "cpu":
        no_effect = f"gpu.memory_gib={memory_gib} has no effect with gpu=cpu. Name the card to plan for, e.g. gpu=8gb."
        warnings = () if memory_gib is None else (no_effect,)
        return Budget(None, "cpu", False, "gpu=cpu: training on the CPU", warnings)
    named = PROFILES.get(profile_name)
    wanted_gib = memory_gib if memory_gib is not None else named.budget_gib if named else None
    source = f"gpu={profile_name}"
    if wanted_gib is not None and not (named and wanted_gib == named.budget_gib):
        source = f"gpu.memory_gib={wanted_gib:g}"
    cards = facts.training_gpus[: max(1, num_devices)]
    if not cards:
        return _without_gpu(profile_name, source, wanted_gib, facts)
    card = min(cards, key=_available_gib)
    has_gib, own = _available_gib(card), pick_profile(_size_gib(card)).name
    if wanted_gib is None:
        by = f"other processes: {card.held_by()}" if card.holders else "other processes"
        because = f"{BUDGET_FRAC} x ({_size_gib(card):.1f} GiB of {card.name} - {card.others_gib:.1f} held by {by})"
        return Budget(BUDGET_FRAC * has_gib, own, bool(enforce), because)
    return _named_budget(profile_name if named else own, source, wanted_gib, enforce, card)


def lacks_tensor_cores(name: str) -> bool:
    """Returns whether a card of capability 7.5 with this name has no tensor cores."""
    return _NO_TENSOR_CORES.search(name) is not None


def least_capable(cards: Iterable[GpuFacts]) -> GpuFacts | None:
    """Returns the card that limits the precision of a run on all of them; None without cards."""
    return min(cards, key=lambda card: (_capability(card) or (), not lacks_tensor_cores(card.name)), default=None)


def resolve_precision(asked: str, device: GpuFacts | None) -> PrecisionChoice | Fault:
    """Returns the precision of a run, or a fault if the device can't do the one that was set.

    Args:
        asked: knob gpu.precision: auto, 32-true, bf16-mixed, 16-mixed or bf16-true.
        device: card to train on, the least capable of several; None = the CPU.
    """
    where = "the CPU" if device is None else device.name
    capability = None if device is None else _capability(device)
    if device is not None and capability is not None:
        where = f"{where} (capability {device.capability})"
    has_bf16 = capability is not None and capability >= (8,)
    if asked == "auto":
        if has_bf16:
            return PrecisionChoice("bf16-mixed", f"{where}: bf16 from capability 8.0")
        if device is not None and lacks_tensor_cores(device.name):
            return PrecisionChoice("32-true", f"{where}: no tensor cores")
        if capability is not None and capability >= (7,):
            return PrecisionChoice("16-mixed", f"{where}: fp16 tensor cores, no bf16 below 8.0")
        return PrecisionChoice("32-true", f"{where}: no faster precision that auto would choose")
    problem, other = "", "bf16-mixed"
    if asked == "16-mixed" and device is None:
        problem = "16-mixed needs a GPU (fp16 with a gradient scaler), and this run trains on the CPU."
    elif asked.startswith("bf16") and capability is not None and not has_bf16:
        problem, other = f"{asked} needs capability 8.0 or later, and this card is {where}.", "16-mixed"
    if problem:
        return Fault("gpu.precision", problem, f"Set gpu.precision=auto or gpu.precision={other}.")
    return PrecisionChoice(asked, f"gpu.precision={asked} was set; {where} can do it")


def with_cards(
    facts: MachineFacts, profile: str, memory_gib: float | None, devices: int
) -> tuple[MachineFacts, str | None]:
    """Returns the machine with the cards that a plan assumes, and a sentence about cards that are missing. Real cards
    that are large enough are kept. Without a profile or a budget the machine is returned unchanged."""
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
        model = GpuFacts(0, None, "an assumed GPU", size_gib, ASSUMED_CAPABILITY)
        what, there = f"a card of {size_gib:g} GiB and capability {ASSUMED_CAPABILITY}", "not in this machine"
    cards = tuple(
        replace(model, index=index, uuid=None, free_gib=model.memory_gib, nvml_index=None, holders=())
        for index in range(devices)
    )
    times = f"{devices} x " if devices > 1 else ""
    return replace(facts, gpus=cards, torch_problem=None, warnings=()), f"Planned for {times}{what}; {there}."


def _without_gpu(profile_name: str, source: str, wanted_gib: float | None, facts: MachineFacts) -> Budget:
    """Returns a budget without a usable card. A named budget is planned with but not enforced."""
    why = f"no NVIDIA GPU here (NVML: {facts.nvml_problem or 'not asked'})"
    if facts.gpus:
        why = f"torch can't use {facts.gpus[0].describe()} ({facts.torch_problem})"
    if wanted_gib is None:  # warn only about a card that can't be used
        idle = f"gpu={profile_name}: {why}; training on the CPU. gpu=cpu says so without this warning."
        return Budget(None, "cpu", False, why, (idle,) if facts.gpus else ())
    auto = "" if profile_name == "auto" else "gpu=auto picks the cpu profile; "
    warning = (
        f"{source}: {why}; training on the CPU, the budget of {wanted_gib:g} GiB is not enforced. "
        f"{auto}trainer.accelerator=gpu makes this an error."
    )
    profile = "cpu" if profile_name == "auto" else profile_name
    return Budget(wanted_gib, profile, False, f"{source}: planned for that card; {why}", (warning,))


def _named_budget(profile: str, source: str, wanted_gib: float, enforce: bool | None, card: GpuFacts) -> Budget:
    """Returns a budget that the user named, by profile or by gpu.memory_gib."""
    has_gib, own = _available_gib(card), pick_profile(_size_gib(card)).name
    fits = wanted_gib <= has_gib
    cap = enforce if enforce is not None else fits
    shown = card.describe() + (f", whose profile is {own}" if profile != own else "")
    if card.others_gib >= 0.05:
        shown += f", of which other processes hold {card.others_gib:.1f}: {card.held_by()}"
    if not fits:
        budget_gib, because = BUDGET_FRAC * has_gib, f"{BUDGET_FRAC} x {has_gib:.1f} GiB that {card.name} has"
        planned = f"planning for the {budget_gib:.1f} GiB it has instead of {wanted_gib:g}"
        warning = f"{source}: this card is {shown}; {planned}. gpu=auto sizes the run to the card."
        return Budget(budget_gib, profile, cap, because, (warning,))
    capped = "capping the allocator" if cap else "not capping the allocator (gpu.enforce=false)"
    warning = f"gpu={profile}: this card is {shown}; planning for {wanted_gib:g} GiB and {capped}."
    return Budget(wanted_gib, profile, cap, f"{source} on {card.describe()}", (warning,) if profile != own else ())


def _capability(card: GpuFacts) -> tuple[int, ...] | None:
    return None if card.capability is None else tuple(int(number) for number in card.capability.split("."))


def _size_gib(card: GpuFacts) -> float:
    """Returns the card's memory; as the smallest profile has it if the card does not report it."""
    return PROFILES["8gb"].nominal_gib if card.memory_gib is None else card.memory_gib


def _available_gib(card: GpuFacts) -> float:
    """Returns the memory that this process could have."""
    return _size_gib(card) - card.others_gib
