"""Holds what ``python -m wellfed plan`` has found: the plan of a run that is not run, for as many devices as asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from wellfed.planning.run_plan import RunPlan


@dataclass(frozen=True)
class DryPlan:
    """A plan by prediction alone."""

    plan: RunPlan
    by_devices: tuple[RunPlan, ...]
    """For each number of GPUs up to the one asked for; empty for one device."""
    imagined: str | None
    """What is not in this machine."""
    workload: str

    def to_dict(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        plan = self.plan
        return {
            "fits": fits(plan),
            "workload": self.workload,
            "device": plan.device.name,
            "imagined": self.imagined,
            "budget_gib": plan.device.memory_gib,
            "predicted_peak_gib": plan.predicted_peak_gib,
            "peak_moment": plan.peak_moment,
            "parts": dict(plan.parts),
            "plan": plan.to_dict(),
            "findings": [] if plan.misfit is None else [_finding(plan)],
            "warnings": list(plan.warnings),
            "by_devices": [
                {
                    "devices": each.trainer.devices,
                    "micro_batch": each.memory.micro_batch,
                    "accumulate": each.memory.accumulate,
                    "predicted_peak_gib": each.predicted_peak_gib,
                    "fits": fits(each),
                }
                for each in self.by_devices
            ],
        }


def fits(plan: RunPlan) -> bool | None:
    """Whether a plan keeps to its budget; None where nothing could be predicted."""
    return None if plan.predicted_peak_gib is None else plan.misfit is None


def _finding(plan: RunPlan) -> dict[str, Any]:
    return {
        "id": "does_not_fit",
        "severity": "error",
        "evidence": {"budget_gib": plan.device.memory_gib, "predicted_peak_gib": plan.predicted_peak_gib},
        "message": str(plan.misfit),
        "change": list(plan.remedies),
        "changes_learning": False,
    }
