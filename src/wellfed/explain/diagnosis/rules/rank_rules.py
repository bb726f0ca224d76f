"""Finds the rank that the others wait for, a slow link between the ranks, and a rank that needs more memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist, median

from wellfed.explain.diagnosis import thresholds as limits
from wellfed.explain.diagnosis.evidence import Evidence, host_of
from wellfed.explain.diagnosis.finding import Figures, Finding, Gain
from wellfed.explain.diagnosis.gains.feeding import copies_ahead, knobs, may_copy_ahead, most_workers
from wellfed.explain.diagnosis.ranks.rank_comparison import (
    Cause,
    Straggler,
    card_of,
    cause_of,
    compared_ranks,
    has_phases,
    machine_of,
    ms_of,
    named_rank,
    share_factor,
    straggler_of,
)
from wellfed.explain.diagnosis.ranks.rank_troubles import clock_mhz, others_memory
from wellfed.record import RankEntry
from wellfed.units import MIB, show_bytes, show_count, show_gib, show_ms, show_percent

_BYTES = 4
"""Bytes of a gradient of a weight in float32, for records without ``parameter_bytes``."""
_PASSES = 3
"""Own work of a step over its forward pass, where the backward pass takes twice as long."""


def straggler(evidence: Evidence) -> Finding | None:
    """Returns a finding if all other ranks wait for one, with why it is slow."""
    found = straggler_of(evidence)
    return None if found is None else _BY_CAUSE[cause_of(evidence, found)](evidence, found)


def _input_straggler(evidence: Evidence, found: Straggler) -> Finding:
    """Returns the finding that one rank waits longer for its data than the others."""
    (waits_ms, usual_ms), figures = found.ms("wait"), _building(found)
    text = (
        f"in each step it waits {show_ms(waits_ms)} for data, and rank {found.typical['rank']} waits "
        f"{show_ms(usual_ms)}"
    )
    if figures:
        text += f". It builds a batch in {show_ms(float(figures['build_ms']))}"
        if (other_ms := found.typical.get("build_ms")) is not None:
            text += f", rank {found.typical['rank']} in {show_ms(other_ms)}"
    change = _more_workers(evidence, found)
    return found.finding("input_straggler", text, {"wait_ms": waits_ms, **figures}, change)


def _building(found: Straggler) -> Figures:
    build_ms, cpu_frac = found.rank.get("build_ms"), found.rank.get("build_cpu_frac")
    figures: Figures = {} if build_ms is None else {"build_ms": build_ms}
    return figures if cpu_frac is None or build_ms is None else {**figures, "build_cpu_frac": cpu_frac}


def _more_workers(evidence: Evidence, found: Straggler) -> tuple[str, ...]:
    """Returns the override that lets this rank build batches as fast as steps use them, if workers can do it."""
    build_ms, cpu_frac = found.rank.get("build_ms"), found.rank.get("build_cpu_frac")
    waits = cpu_frac is not None and cpu_frac < limits.BUILD_WAITS_FRAC
    fed_ms = limits.CAPACITY_FRAC * (found.step_ms - found.lost_ms)
    if build_ms is None or fed_ms <= 0 or evidence.value("loader.backend") == "own":
        return ()
    needed = math.ceil(build_ms / fed_ms) + 1
    if needed > most_workers(evidence):
        return ()
    more = needed - evidence.num_workers
    if more <= 0 or not (waits or _has_cores(evidence, found.rank, more)):
        return ()
    own = {"backend": "auto"} if evidence.value("loader.backend") == "inline" else {}
    return knobs(evidence, **own, num_workers=needed)


def _has_cores(evidence: Evidence, rank: RankEntry, more: int) -> bool:
    """Returns whether all ranks of this one's machine may have so many workers more, by quota and idle cores."""
    here, quota = [one for one in evidence.record.ranks if host_of(one) == host_of(rank)], rank.get("cpu_quota_cores")
    if quota is None:
        return False
    idle = rank.get("host_cores", 0) - (rank.get("machine_cores") or 0.0)
    left = quota - sum(one.get("cores") or 0.0 for one in here)
    return len(here) * more <= min(idle, left)


def _copy_straggler(evidence: Evidence, found: Straggler) -> Finding:
    """Returns the finding that one rank copies its batches to its GPU more slowly than the others."""
    copy_ms, usual_ms = found.ms("copy")
    text = f"each step waits {show_ms(copy_ms)} for its copy to the GPU, that of rank {found.typical['rank']} "
    text += show_ms(usual_ms)
    if not copies_ahead(evidence) and (size := found.rank.get("batch_mib")) and copy_ms > 0:
        text += f", which is {size * MIB / 1e6 / copy_ms:.2g} GB/s"
    change = []
    if evidence.value("loader.pin_memory") is False and evidence.value("loader.backend") != "own":
        change.append("loader.pin_memory=true")
    if may_copy_ahead(evidence):
        change.append("loader.device_prefetch=2")
    if not change:
        text += ". The link of that card, or the memory that its process reads from, is slower: nvidia-smi topo -m"
    return found.finding("copy_straggler", text, {"copy_ms": copy_ms}, tuple(change))


def _host_straggler(_: Evidence, found: Straggler) -> Finding:
    """Returns the finding that one rank spends more time between its steps."""
    host_ms, usual_ms = found.ms("host")
    text = (
        f"between two steps it takes {show_ms(host_ms)}, rank {found.typical['rank']} {show_ms(usual_ms)}. Callbacks, "
        "loggers and hooks run then: make those cheaper that run on this rank alone"
    )
    return found.finding("host_straggler", text, {"host_ms": host_ms})


def _compute_straggler(evidence: Evidence, found: Straggler) -> Finding:
    """Returns the finding that one rank computes longer, without a cause that its figures show."""
    slow_ms, usual_ms = found.ms(found.part)
    figures: Figures = {"slow_ms": slow_ms, "usual_ms": usual_ms}
    remark = others_memory(evidence, found.rank, found.typical)
    is_read = clock_mhz(evidence, found.rank) is not None and clock_mhz(evidence, found.typical) is not None
    seen = "Its batches, its machine and its card show" if is_read else "Its batches and its machine show"
    cause = f"{seen} no cause: look for work that the model does on this rank alone"
    if not is_read and found.rank["gpu"] is not None:
        cause += ", and at its card, which was not read"
    if remark:
        cause = f"{remark}. Or the model does work on this rank alone"
    return found.finding("compute_straggler", f"{found.compared()}. {cause}", figures)


def _uneven_shares(_: Evidence, found: Straggler) -> Finding:
    """Returns the finding that more samples, or longer ones, make one rank slower than the others.

    Where its time can't be told from waiting, the finding is a note.
    """
    rank, other = found.rank, found.typical
    samples, usual = rank.get("samples") or 0.0, other.get("samples") or 0.0
    size, usual_size = rank.get("batch_mib") or 0.0, other.get("batch_mib") or 0.0
    shown = f"{show_bytes(size * MIB)}, those of rank {other['rank']} {show_bytes(usual_size * MIB)}"
    if samples and usual and samples / usual >= share_factor(rank, other):
        shown = f"{show_count(samples)} samples, those of rank {other['rank']} {show_count(usual)}"
        cure = "give all ranks as many samples"
    else:
        cure = "group samples by length, so that all ranks of a step get alike ones"
    figures: Figures = {"samples": samples, "usual_samples": usual, "batch_mib": size, "usual_batch_mib": usual_size}
    if found.part == "compute":
        text = (
            f"The batches of {named_rank(rank)} have {shown} on average, so others may wait for it: {cure}. How long "
            "they wait is unknown, since waiting can't be told from computing here."
        )
        return Finding("uneven_shares", text, found.figures | figures, is_note=True)
    return found.finding("uneven_shares", f"its batches have {shown} on average: {cure}", figures)


def _slow_gpu(evidence: Evidence, found: Straggler) -> Finding | None:
    """Returns the finding that power, heat or something else holds down the clock of one rank's card."""
    trouble = card_of(evidence, found)
    if trouble is None:
        return None
    text, figures = trouble
    if found.part != "compute":
        text += f", so {found.compared()}"
    return found.finding("slow_gpu", f"{text}. No setting of a run changes that: look at that card", figures)


def _slow_machine(evidence: Evidence, found: Straggler) -> Finding | None:
    """Returns the finding that one rank has no core, or its machine's disk is slow."""
    trouble = machine_of(evidence, found)
    if trouble is None:
        return None
    text, figures, cure = trouble
    return found.finding("slow_machine", f"{text}, so {found.compared()}. {cure}", figures)


_BY_CAUSE: dict[Cause, Callable[[Evidence, Straggler], Finding | None]] = {
    "input_straggler": _input_straggler,
    "copy_straggler": _copy_straggler,
    "host_straggler": _host_straggler,
    "compute_straggler": _compute_straggler,
    "uneven_shares": _uneven_shares,
    "slow_gpu": _slow_gpu,
    "slow_machine": _slow_machine,
}


def slow_link(evidence: Evidence) -> Finding | None:
    """Returns a finding if the backward passes of all ranks, which contain the averaging, take very long.

    The straggler's own pass, in which it waits for no rank, is the shortest. Own work is up to `BACKWARD_FACTOR` times
    the forward pass in most models. It is more with gradients of a large embedding or of a gradient penalty, so the
    finding is a note unless an override may help. If each rank's own work varies from step to step, the shortest pass
    contains waiting, too: then it is a note as well.
    """
    ranks, process = compared_ranks(evidence), evidence.record.process
    if not ranks or process is None or not has_phases(evidence, ranks):
        return None
    step_ms = sum(one["step_ms_mean"] for one in ranks) / len(ranks)
    forward_ms = max(ms_of(one, "forward") for one in ranks)
    most_ms = min(ms_of(one, "backward") for one in ranks) - limits.BACKWARD_FACTOR * forward_ms
    num_bytes = process.get("parameter_bytes", _BYTES * process["parameter_values"])
    if most_ms < limits.REDUCTION_FRAC * step_ms or num_bytes < limits.REDUCTION_MIB * MIB:
        return None
    gb_per_s = 2 * (len(ranks) - 1) / len(ranks) * num_bytes / 1e6 / most_ms
    if gb_per_s > limits.SLOW_LINK_GB_S:
        return None
    text = (
        f"All {len(ranks)} ranks spend up to {show_ms(most_ms)} of each step of {show_ms(step_ms)} "
        f"({show_percent(most_ms / step_ms)}) on averaging {show_bytes(num_bytes)} of gradients ({gb_per_s:.2g} GB/s). "
        "Their backward passes take that much longer than three forward passes. If the model does not explain it, the "
        "link between them limits the run. More samples a step, or a faster link, make its share smaller"
    )
    figures: Figures = {"reduction_ms": most_ms, "step_ms": step_ms, "gradient_mib": num_bytes / MIB}
    figures["gb_per_s"] = gb_per_s
    varies = _varies(ranks, most_ms)
    if varies:
        text += ". So do steps of alike length: here each rank's work varies, and all wait for the longest"
    if varies is not False or evidence.value("memory.on_oom") != "retry":
        return Finding("slow_link", f"{text}.", figures, is_note=True)
    hidden_ms = min(most_ms, (limits.BACKWARD_FACTOR - 1) * forward_ms)
    high = step_ms / (step_ms - hidden_ms)
    text += ". With memory.on_oom=fail, gradients are averaged while the backward pass still computes"
    return Finding(
        "slow_link",
        f"{text}.",
        figures,
        ("memory.on_oom=fail",),
        gain=Gain((1 + high) / 2, 1.0, high),
        lost_frac=most_ms / step_ms / 2,  # in the middle between none and all
    )


def _varies(ranks: Sequence[RankEntry], most_ms: float) -> bool | None:
    """Returns whether waiting for whichever rank takes longest in a step may take as long as averaging seems to.

    None if that is unknown.

    The expected maximum of normal values is their mean and some standard deviations more (Blom 1958). Those of the
    passes are estimated from the own work that is timed.
    """
    number = len(ranks)
    above = NormalDist().inv_cdf((number - 0.375) / (number + 0.25))
    for one in ranks:
        half_ms, steps = one.get("work_half_ms"), one.get("phase_steps") or one.get("steps")
        if half_ms is None or steps is None:
            return None
        if above * _PASSES * half_ms / 2 * math.sqrt(steps) >= most_ms:
            return True
    return False


def uneven_memory(evidence: Evidence) -> Finding | None:
    """Returns a note on the rank whose peak of memory is far above that of the others."""
    peaks = {one["rank"]: one["peak_gib"] for one in evidence.record.ranks if one["peak_gib"] is not None}
    if len(peaks) < 2:
        return None
    highest = max(peaks, key=lambda rank: peaks[rank])
    peak, usual = peaks.pop(highest), median(peaks.values())
    if peak < limits.UNEVEN_MEMORY_FACTOR * usual or peak - usual < limits.UNEVEN_MEMORY_GIB:
        return None
    rank = next(one for one in evidence.record.ranks if one["rank"] == highest)
    named = named_rank(rank)
    text = (
        f"{named[0].upper()}{named[1:]} needs {show_gib(peak)} of memory, the others {show_gib(usual)}. All ranks have "
        "one micro-batch, so memory runs out on this rank first: look for tensors that it alone keeps, or for longer "
        "samples."
    )
    figures: Figures = {"rank": highest, "host": rank.get("host", ""), "peak_gib": peak, "usual_gib": usual}
    return Finding("uneven_memory", text, figures, is_note=True)
