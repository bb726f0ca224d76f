"""Finds one process that drives several GPUs with torch.nn.DataParallel."""

from __future__ import annotations

from wellfed.diagnosis.evidence import Evidence
from wellfed.diagnosis.finding import Finding, Gain
from wellfed.units import show_percent


def check(evidence: Evidence) -> Finding | None:
    """Where the model copies itself to other cards in each step."""
    event = next((event for event in evidence.record.events if event["kind"] == "data_parallel"), None)
    if event is None:
        return None
    devices = int(event.get("devices") or len(evidence.record.machine.get("gpus") or []))
    figures: dict[str, float | int | str] = {"devices": devices}
    said, gain, busy = "", None, evidence.util_pct
    if busy is not None and busy > 0:
        figures["util_pct"] = busy
        said = f" The GPU that is idle most is busy for {show_percent(busy / 100)} of the time."
        high = max(1.0, 100 / busy)
        gain = Gain(1 + 0.5 * (high - 1), 1.0, high) if high < devices else Gain((1 + devices) / 2, 1.0, devices)
    return Finding(
        "data_parallel",
        f"One process drives {devices} GPUs with torch.nn.DataParallel: in each step it copies weights and samples to "
        f"them and gathers results, and one Python launches for all.{said} Take DataParallel out of the model, and let "
        "each GPU have a process.",
        figures,
        (f"trainer.devices={devices}", "trainer.strategy=ddp") if devices > 1 else (),
        gain=gain if devices > 1 else None,
    )
