"""Finds a rank whose copies to its GPU are slow, so that all other ranks wait for it."""

from __future__ import annotations

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding
from wellfed.explain.diagnosis.gains.feeding import copies_ahead, may_copy_ahead
from wellfed.explain.diagnosis.ranks.rank_comparison import straggling
from wellfed.units import MIB, show_ms


def check(evidence: Evidence) -> Finding | None:
    """Returns a finding if one rank copies its batches more slowly than the others, and they wait for it."""
    found = straggling(evidence, "copy_straggler")
    if found is None:
        return None
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
