"""Finds one process that drives several GPUs with torch.nn.DataParallel."""

from __future__ import annotations

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Figures, Finding, Gain
from wellfed.units import show_percent


def check(evidence: Evidence) -> Finding | None:
    """Returns a finding if the model copies itself to other cards in each step."""
    event = next((event for event in evidence.record.events if event["kind"] == "data_parallel"), None)
    if event is None:
        return None
    devices = int(event.get("devices") or 0)
    figures: Figures = {"devices": devices}
    if devices < 2:
        return Finding(
            "data_parallel",
            f"The model contains a torch.nn.DataParallel ({event.get('module', 'a module of it')}): with several "
            "GPUs, one process would copy weights and samples to all of them in each step. Take it out; "
            "trainer.devices=2 trainer.strategy=ddp gives each GPU a process.",
            figures,
        )
    text, gain, busy = "", None, evidence.telemetry.util_pct
    if busy is not None and busy > 0:
        figures["util_pct"] = busy
        text = f" The GPU that is idle most is busy for {show_percent(busy / 100)} of the time."
        high = min(1 / (1 - _idle_frac(evidence, busy / 100)), devices)
        gain = Gain((1 + high) / 2, 1.0, high)
    return Finding(
        "data_parallel",
        f"One process drives {devices} GPUs with torch.nn.DataParallel. In each step it copies weights and samples to "
        f"them and gathers results, and one Python process launches all kernels.{text} Take DataParallel "
        "out of the model, and let each GPU have a process.",
        figures,
        (f"trainer.devices={devices}", "trainer.strategy=ddp"),
        gain=gain,
    )


def _idle_frac(evidence: Evidence, busy_frac: float) -> float:
    """Returns the share of the time in which the idlest GPU computes nothing though the step computes. Waiting for
    data, copies and the time between steps have other causes."""
    time = evidence.record.time
    return max(0.0, (1.0 if time is None else time["compute_frac"]) - busy_frac)
