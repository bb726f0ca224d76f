"""Holds the steps of a tune: compares each with the best, measures again against noise, keeps or drops."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from wellfed.observe.timing.interval import student_t
from wellfed.study.points.guided.change import Change, Knobs, TuneTrial, knob_of, same_plan
from wellfed.study.points.guided.gain import LEAST_GAIN
from wellfed.study.points.guided.moves import TuneMachine
from wellfed.study.repeats import MeasuredRun, Noise, pooled_noise
from wellfed.units import counted, show_factor

_UNKNOWN_FRAC = 0.03
"""Half width of a figure without an interval, relative to the figure."""
_CONFIDENCE = 0.9975
"""One-sided confidence for keeping a change. A tune compares about ten, and seldom keeps one for noise alone."""
_MOST_RUNS = 3
"""Most measurements of a change that looks better; the best gets one more."""
_HOPELESS_FRAC = 0.35
"""Least gain, relative to its noise, that is measured further."""


@dataclass(frozen=True)
class TuneBudget:
    """Limits of a tune."""

    max_trials: int
    """Most trials, the start's included."""
    max_seconds: float
    """Most seconds of all trials and their preparation. No trial is begun that would probably end later."""


@dataclass(frozen=True)
class Step:
    """A configuration that was tried."""

    change: Change
    trial: TuneTrial
    is_kept: bool
    before: float | None
    """Figure of the best before it; None for the start."""
    gain: float | None
    """Factor by which it is better than that one; None where one has no figure."""
    why: str
    """Why it was kept or dropped."""
    figures: tuple[float, ...] = ()
    """Figures of all its runs; the trial's own figure is their geometric mean."""
    again_seconds: float = 0.0
    """Duration of its runs after the first."""
    is_out: bool = False
    """Never kept, however fast: its plan equals one that was measured before, or changed a fixed knob."""

    @property
    def is_doubtful(self) -> bool:
        """Whether it looked better than the best of its time, within noise."""
        return self.gain is not None and self.gain >= LEAST_GAIN and not (self.is_kept or self.is_out)

    def to_dict(self) -> dict[str, Any]:
        """Returns the step as ``tune.json`` has it."""
        change, trial = self.change, self.trial
        return {
            "turned": list(change.turned),
            "overrides": list(change.overrides),
            "because": change.because,
            "finding": change.finding,
            "status": trial.status,
            "before": self.before,
            "after": trial.figure,
            "ci95": trial.ci95,
            "gain": self.gain,
            "is_kept": self.is_kept,
            "why": self.why,
            "seconds": trial.seconds,
            "beside_seconds": round(trial.beside_seconds, 3),
        }


@dataclass
class GuidedSteps:
    """Steps of a tune so far: compared with the best, measured again against noise, kept or dropped."""

    budget: TuneBudget
    machine: TuneMachine
    fixed: frozenset[str] = frozenset()
    """Knobs and groups that are never turned: ``loader.num_workers``, ``memory``."""
    again: Callable[[Change, int], TuneTrial] | None = None
    """Measures a configuration for the n-th time beyond the first. None: the intervals of single runs decide."""
    steps: list[Step] = field(default_factory=list)

    @property
    def best(self) -> Step | None:
        """The best so far; None where the start is not measured, or could not be."""
        return next((step for step in reversed(self.steps) if step.is_kept), None)

    @property
    def start(self) -> Step | None:
        """The first step; None before its result."""
        return self.steps[0] if self.steps else None

    @property
    def spent_seconds(self) -> float:
        """Duration of all trials so far."""
        return math.fsum(step.trial.seconds + step.again_seconds for step in self.steps)

    def noise(self, *more: Step) -> Noise | None:
        """Returns the noise between runs of one configuration, of ``more`` steps too; None: none was measured twice."""
        runs = ([MeasuredRun(figure, None) for figure in step.figures] for step in (*self.steps, *more))
        return pooled_noise(runs)

    @property
    def noise_text(self) -> str:
        """A sentence on what repeated runs show."""
        if (noise := self.noise()) is None:
            return "Noise between runs: unknown, since no configuration was measured twice."
        repeated = sum(len(step.figures) for step in self.steps if len(step.figures) > 1)
        return (
            f"Noise between runs of one configuration: {100 * noise.relative_sd:.1f} % (standard deviation, of "
            f"{repeated} runs, {counted(noise.degrees, 'degree')} of freedom); a change is kept only beyond it."
        )

    @property
    def used_seconds(self) -> float:
        """Used part of the budget: all trials and their preparation."""
        return self.spent_seconds + math.fsum(step.trial.beside_seconds for step in self.steps)

    def measured_alike(self, plan: Mapping[str, object]) -> Step | None:
        """Returns the step whose plan equals a plan of these values; None where there is none."""
        wanted = same_plan(plan)
        return next((step for step in self.steps if step.trial.plan and _plan_of(step.trial) == wanted), None)

    def _first_step(self, change: Change, trial: TuneTrial, best: Step | None) -> Step:
        if not trial.is_measured:
            why = f"{trial.status}: {trial.error}" if trial.error else f"ended as {trial.status}"
            return Step(change, trial, False, None if best is None else best.trial.figure, None, why)
        assert trial.figure is not None
        if best is None or best.trial.figure is None:
            return Step(change, trial, not self.steps, None, None, "the start", (trial.figure,))
        alike = self.measured_alike({knob: entry["value"] for knob, entry in trial.plan.items()})
        is_same = alike is not None and set(_unplanned(change)) == set(_unplanned(alike.change))
        # A change that looked better within noise may be measured a second time.
        is_same = is_same and not (alike is not None and alike.is_doubtful)
        changed = self._changed_though_fixed(trial)
        step = self._compared(Step(change, trial, False, None, None, "", (trial.figure,)), best)
        if is_same:
            why = f"{trial.error}: the same as before" if trial.error else "the plan made the same of it as before"
        elif changed:
            why = f"the plan changed {' and '.join(changed)}, which {'is' if len(changed) == 1 else 'are'} fixed"
        else:
            return step
        return replace(step, is_kept=False, why=why, is_out=True)

    def _repeated(self, step: Step, best: Step) -> Step:
        """Returns the compared step, after it and the best were measured again as often as it takes."""
        index = self.steps.index(best)
        while self.again is not None:
            best = self.steps[index]
            noise = self._noise_of(step, best)
            gain = math.log(step.gain or 1.0)
            is_hopeless = gain < _HOPELESS_FRAC * noise < math.inf and len(step.figures) > 1
            if gain > noise or gain < math.log(LEAST_GAIN) or is_hopeless:
                break
            is_bests_turn = len(best.figures) <= len(step.figures)
            done = sum(max(1, len(each.figures)) for each in (*self.steps, step))
            is_over = self.used_seconds + 2 * step.trial.seconds > self.budget.max_seconds
            is_over = is_over or done >= self.budget.max_trials
            if is_over or (len(step.figures) >= _MOST_RUNS and not is_bests_turn):
                break
            more = self._measured_again(best if is_bests_turn else step)
            if more is None:
                break
            if is_bests_turn:
                self._replace_best(index, more)
                best = more
            else:
                step = more
            step = self._compared(step, best)
        return self._compared(step, self.steps[index])

    def _measured_again(self, step: Step) -> Step | None:
        """Returns the step with one run more; None where that did not end well."""
        assert self.again is not None
        trial, old = self.again(step.change, len(step.figures)), step.trial.figure
        if not trial.is_measured or trial.figure is None or not old:
            return None
        figures = (*step.figures, trial.figure)
        mean = math.exp(math.fsum(map(math.log, figures)) / len(figures))
        ci95 = step.trial.ci95
        ci95 = None if ci95 is None else (ci95[0] * mean / old, ci95[1] * mean / old)
        seconds = step.again_seconds + trial.seconds
        return replace(step, figures=figures, again_seconds=seconds, trial=replace(step.trial, figure=mean, ci95=ci95))

    def _replace_best(self, index: int, best: Step) -> None:
        """Replaces the best by its new figure; compares again what was compared with the old one."""
        old = self.steps[index].trial.figure
        self.steps[index] = best
        for at, step in enumerate(self.steps):
            if step.before == old and not step.is_kept and step.trial.figure is not None:
                self.steps[at] = replace(step, before=best.trial.figure, gain=self._gain(step.trial, best))

    def _gain(self, trial: TuneTrial, best: Step) -> float:
        assert trial.figure is not None
        assert best.trial.figure is not None
        return trial.figure / best.trial.figure

    def _noise_of(self, step: Step, best: Step) -> float:
        """Returns the half width of the gain's logarithm, by steps within runs and by repeated runs."""
        counts = [max(1, len(each.figures)) for each in (step, best)]
        within = math.hypot(*(_relative_half(each.trial) for each in (step, best)))
        if self.again is None:
            return within
        noise = self.noise(step)
        if noise is None:
            return math.inf
        between = student_t(noise.degrees, _CONFIDENCE) * noise.relative_sd * math.sqrt(sum(1 / n for n in counts))
        return max(within, between)

    def _compared(self, step: Step, best: Step) -> Step:
        """Returns the step compared with the best; it is kept where it is better beyond noise."""
        gain, noise = self._gain(step.trial, best), self._noise_of(step, best)
        runs = f", {counted(len(step.figures), 'run')} against {len(best.figures)}" if self.again is not None else ""
        is_kept = False
        if gain < LEAST_GAIN:
            why = "no better" if gain >= 1 / LEAST_GAIN else "worse"
        elif math.log(gain) <= noise:
            give = "noise unknown" if noise == math.inf else f"give or take {100 * noise:.0f} %"
            why = f"within noise: {show_factor(gain)} times as good, {give}{runs}"
        else:
            is_kept, why = True, f"{show_factor(gain)} times as good{runs}"
        return replace(step, before=best.trial.figure, gain=gain, is_kept=is_kept, why=why)

    def _changed_though_fixed(self, trial: TuneTrial) -> list[str]:
        """Returns fixed knobs whose planned value differs from the start's, where they matter in both."""
        mine, starts = dict(_plan_of(trial)), dict(_plan_of(self.steps[0].trial))
        return sorted(knob for knob in self.fixed & mine.keys() & starts.keys() if mine[knob] != starts[knob])


def _relative_half(trial: TuneTrial) -> float:
    """Returns half of the 95 % interval relative to the figure."""
    if trial.ci95 is None or not trial.figure:
        return _UNKNOWN_FRAC
    return (trial.ci95[1] - trial.ci95[0]) / 2 / trial.figure


def _plan_of(trial: TuneTrial) -> Knobs:
    return same_plan({knob: entry["value"] for knob, entry in trial.plan.items()})


def _unplanned(change: Change) -> Iterator[str]:
    """Yields overrides of knobs that no plan has, in which two equal plans may differ."""
    return (setting for setting in change.overrides if knob_of(setting) in ("gpu.channels_last", "gpu.cudnn_benchmark"))
