"""Summarises a user's training loop: its rate, the time shares of a step, GPU utilisation, and the bottleneck."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
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
_LARGER = "Larger batches, or whole batches at once (a dataset with __getitems__), cost less a sample."


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
        if (found := self.steps) is not None:
            names = ("wait_frac", "copy_frac", "compute_frac", "host_frac", "step_ms_p50", "step_ms_p95")
            steps = {name: getattr(found, name) for name in ("steps", "warmup_steps", "ci95", "readiness_frac")}
            steps |= {name: self._time[name] for name in names}
            steps |= {"steps_per_s": found.samples_per_s, "step_ms_mean": self._step_ms()}
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
        parts = {"wait": "waiting for data", "copy": "copy", "compute": "compute", "host": "between steps"}
        shares = {text: self._time[f"{part}_frac"] for part, text in parts.items() if self._is_known(part)}
        shown = ", ".join(f"{name} {show_percent(share)}" for name, share in shares.items() if share is not None)
        return [
            f"{rate} over {counted(found.steps, 'step')} after {found.warmup_steps} of warm-up",
            f"a step takes {self._step_ms():.2f} ms on average (median {self._time['step_ms_p50']:.2f}, "
            f"p95 {self._time['step_ms_p95']:.2f}): {shown}",
        ]

    @property
    def _time(self) -> Mapping[str, Any]:
        return {} if self.steps is None else self.steps.time

    def _is_known(self, part: str) -> bool:
        return f"{part}_frac" not in self.unknown

    def _step_ms(self) -> float:
        """Returns the mean, from which rate and shares are computed, too."""
        return math.nan if self.steps is None else 1e3 / self.steps.samples_per_s

    def _gpu_lines(self) -> list[str]:
        lines = [f"GPU {gpu}: {level.message}" for gpu, level in self.levels.items()]
        unread = "no utilisation was read, or too little; a split card (MIG) has none"
        return [*lines, *(f"GPU {gpu}: {unread}" for gpu in self.unread)]

    def advice(self) -> str | None:
        """Returns the bottleneck of the loop in a sentence; None with too few steps."""
        if self.steps is None or self.steps.steps < FEWEST_STEPS:
            return None
        wait, host = self._time["wait_frac"] if self._is_known("wait") else 0.0, self._time["host_frac"]
        if wait > WAIT_FRAC and host <= max(HOST_FRAC, wait):
            return f"{show_percent(wait)} of the time goes into waiting for data: {self._loader()}"
        if host > HOST_FRAC:
            return f"{show_percent(host)} of the time goes into what lies between steps: {_BETWEEN}."
        hardly = "Steps hardly wait for data" if self._is_known("wait") else "The wait for data is unknown here"
        if any(level.verdict != "well used" for level in self.levels.values() if not level.is_idle):
            within = "small kernels, or lines that wait for the GPU (.item(), .cpu(), a print)"
            return f"{hardly}; where a GPU idles, it does so within steps: {within}."
        return f"{hardly}."

    def _loader(self) -> str:
        if self.num_workers is None:
            return "batches are built more slowly than they are used."
        if self.num_workers == 0:
            in_process = "the DataLoader builds each batch in the training process (num_workers=0)."
            if self._step_ms() >= 2 * HANDOVER_MS:
                return f"{in_process} Try num_workers={max(1, min(_MOST_WORKERS, int(self.cores) - 1))}."
            return f"{in_process} Workers hardly pay: handing over a batch takes about {HANDOVER_MS:g} ms. {_LARGER}"
        return (
            f"the DataLoader's workers can't keep up (num_workers={self.num_workers}, on {self.cores:g} CPU cores). "
            f"More of them help while cores are free, if building a batch takes longer than the about {HANDOVER_MS:g} "
            f"ms to hand it over; else use num_workers=0. {_LARGER}"
        )
