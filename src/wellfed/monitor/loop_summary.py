"""Summarises a user's training loop: its rate, the time shares of a step, GPU utilisation, and the bottleneck."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from wellfed.explain.diagnosis.curves.curve_verdict import CurveUtilisation
from wellfed.explain.diagnosis.script_words import HANDOVER_MS
from wellfed.explain.diagnosis.thresholds import FEWEST_STEPS, HOST_FRAC, WAIT_FRAC
from wellfed.observe.timing.readiness import StepSummary
from wellfed.observe.timing.step_clock import WARMUP_STEPS
from wellfed.units import counted, show_count, show_percent

_MOST_WORKERS = 4
"""Maximum number of workers that a run of wellfed starts with."""
_BETWEEN = "logging, callbacks, values that are printed"
_WITHOUT_WORKERS = (
    "Larger batches, or whole batches at once (a dataset with __getitems__), cost less a sample with any num_workers."
)


@dataclass(frozen=True)
class LoopSummary:
    """Figures of a loop so far."""

    steps: StepSummary | None
    """Steps after the warm-up; None if none was timed."""
    unknown: frozenset[str]
    """Shares that could not be timed: ``wait_frac``, ``copy_frac``."""
    levels: Mapping[int, CurveUtilisation]
    """CUDA's number of a GPU -> its utilisation level."""
    unread: tuple[int, ...]
    """Watched GPUs with too few readings of utilisation."""
    num_workers: int | None
    """Workers of the DataLoader; None for another loader."""
    cores: float
    """CPU cores that this process may use."""
    notes: tuple[str, ...]
    """Remarks on what could not be watched."""

    def entry(self) -> dict[str, Any]:
        """Returns all figures as plain data. Shares are of the time of a step, 0 to 1."""
        steps: dict[str, Any] = {"steps": 0}
        if self.steps is not None:
            known = {**asdict(self.steps), **self.steps.time}
            names = ("steps", "warmup_steps", "ci95", "readiness_frac", "wait_frac", "copy_frac", "compute_frac")
            steps = {name: known[name] for name in (*names, "host_frac", "step_ms_p50", "step_ms_p95")}
            steps |= {"steps_per_s": self.steps.samples_per_s, "step_ms_mean": self._step_ms()}
            steps |= dict.fromkeys(self.unknown)
            if "wait_frac" in self.unknown:
                steps["readiness_frac"] = None
        gpus = {str(gpu): {**level.entry(), "advice": None} for gpu, level in self.levels.items()}
        return {**steps, "gpus": gpus, "advice": self.advice(), "notes": list(self.notes)}

    def lines(self) -> list[str]:
        """Returns the same as text."""
        return [*self._step_lines(), *self._gpu_lines(), *filter(None, [self.advice()]), *self.notes]

    def _step_lines(self) -> list[str]:
        found = self.steps
        if found is None:
            return [f"Too few steps to time: the first {WARMUP_STEPS} are warm-up."]
        rate = f"{show_count(found.samples_per_s)} steps/s"
        if found.ci95 is not None:
            rate += f" (95 % interval {show_count(found.ci95[0])} to {show_count(found.ci95[1])})"
        shares = {
            "waiting for data": None if "wait_frac" in self.unknown else found.time["wait_frac"],
            "copy": None if "copy_frac" in self.unknown else found.time["copy_frac"],
            "compute": found.time["compute_frac"],
            "between steps": found.time["host_frac"],
        }
        shown = ", ".join(f"{name} {show_percent(share)}" for name, share in shares.items() if share is not None)
        return [
            f"{rate} over {counted(found.steps, 'step')} after {found.warmup_steps} of warm-up",
            f"a step takes {self._step_ms():.2f} ms on average (median {found.time['step_ms_p50']:.2f}, "
            f"p95 {found.time['step_ms_p95']:.2f}): {shown}",
        ]

    def _step_ms(self) -> float:
        """Returns the mean, from which rate and shares are computed, too."""
        return math.nan if self.steps is None else 1e3 / self.steps.samples_per_s

    def _gpu_lines(self) -> list[str]:
        idle = [gpu for gpu, level in self.levels.items() if level.is_idle]
        if len(idle) == len(self.levels):  # all GPUs are idle: show each
            idle = []
        lines = [f"GPU {gpu}: {level.message}" for gpu, level in self.levels.items() if gpu not in idle]
        lines += [
            f"GPU {gpu}: no utilisation was read, or too little; a split card (MIG) has none" for gpu in self.unread
        ]
        return [*lines, *([f"nothing ran on GPU {', '.join(map(str, idle))}"] if idle else [])]

    def advice(self) -> str | None:
        """Returns the bottleneck of the loop in a sentence; None with too few steps."""
        if self.steps is None or self.steps.steps < FEWEST_STEPS:
            return None
        wait = None if "wait_frac" in self.unknown else self.steps.time["wait_frac"]
        host = self.steps.time["host_frac"]
        if wait is not None and wait > WAIT_FRAC:
            if host <= max(HOST_FRAC, wait):
                return f"{show_percent(wait)} of the time goes into waiting for data: {self._loader()}"
            most = f"{show_percent(wait)} of the time goes into waiting for data, {show_percent(host)} into"
            return f"{most} what lies between steps: {_BETWEEN}."
        hardly = "The wait for data is unknown here" if wait is None else "Steps hardly wait for data"
        if host > HOST_FRAC:
            return f"{hardly}; what costs time lies between them: {_BETWEEN}."
        if any(level.verdict != "well used" for level in self.levels.values() if not level.is_idle):
            within = "small kernels, or lines that wait for the GPU (.item(), .cpu(), a print)"
            return f"{hardly}; where a GPU idles, it does so within steps: {within}."
        return f"{hardly}."

    def _loader(self) -> str:
        if self.num_workers is None:
            return "batches are built more slowly than they are used."
        if self.num_workers == 0:
            in_process = "the DataLoader builds each batch in the training process (num_workers=0)."
            if self._step_ms() < 2 * HANDOVER_MS:
                return (
                    f"{in_process} Workers hardly pay: each batch takes about {HANDOVER_MS:g} ms to hand over, and a "
                    f"step takes {self._step_ms():.2f} ms. {_WITHOUT_WORKERS}"
                )
            return f"{in_process} Try num_workers={max(1, min(_MOST_WORKERS, int(self.cores) - 1))}."
        of = f"num_workers={self.num_workers}, on {self.cores:g} CPU cores"
        return (
            f"the DataLoader's workers can't keep up ({of}). Where building a batch takes longer than the about "
            f"{HANDOVER_MS:g} ms to hand it over, more workers help while cores are free, and cheaper samples do. "
            f"Where it does not, use num_workers=0. {_WITHOUT_WORKERS}"
        )
