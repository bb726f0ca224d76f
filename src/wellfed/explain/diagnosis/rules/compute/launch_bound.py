"""Finds steps whose kernels the host launches no faster than the card runs them, so that the card waits in between."""

from __future__ import annotations

from math import sqrt

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding, Gain
from wellfed.explain.diagnosis.gains.device_load import device_load
from wellfed.explain.diagnosis.rules.compute import small_batch
from wellfed.explain.diagnosis.rules.compute.synchronisation import places
from wellfed.units import show_percent

_WITHOUT_GRAPHS = ("none", "default")


def check(evidence: Evidence) -> Finding | None:
    """Returns a finding if the host is never ahead of the card, though it waits for nothing itself."""
    load = device_load(evidence)
    if load is None or load.limit != "launches" or load.launch_frac is None:
        return None
    if small_batch.check(evidence) is not None:  # fewer passes launch less, at no cost
        return None
    high = 1 / load.full_frac
    waits = f" The host also waits for the GPU at {places(load.synchronisations)}." if load.synchronisations else ""
    can_compile = evidence.value("gpu.compile") in _WITHOUT_GRAPHS
    return Finding(
        "launch_bound",
        f"The GPU is busy for {show_percent(load.busy_frac)} of the compute time of a step. The host takes "
        f"{show_percent(min(load.launch_frac, 1.0))} of it to run the step's code and launch its kernels, and is never "
        "ahead. Fewer launches make it faster: kernels joined by torch.compile or recorded as a CUDA graph, "
        f"or fewer and larger tensors in the model.{waits}",
        {"busy_frac": load.busy_frac, "full_frac": load.full_frac, "launch_frac": load.launch_frac},
        ("gpu.compile=reduce-overhead",) if can_compile else (),
        gain=Gain(sqrt(high), 1.0, high),
    )
