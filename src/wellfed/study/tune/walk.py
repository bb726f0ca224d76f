"""Decides what tune tries next, and whether a change is kept.

1. The start is measured.
2. The findings of the best configuration so far are tried, the costliest first. Among those about the loader, the one
   that leaves the loader to the plan comes first.
3. Where findings are silent or did not help, a table of moves follows (`moves`).

Tune makes one change at a time, and keeps it if it is better beyond noise. After a kept change, the findings of its own
trial lead. The interval of a single run lacks the noise between runs. So a change that looks better is measured again,
in turns with the best before it. When nothing is left to try, tune goes on with the change that looked best within
noise. Start and result in turns decide at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean, median
from typing import Any

from wellfed.observe.timing.interval import student_t
from wellfed.record.entries import FindingEntry
from wellfed.study.repeats import MeasuredRun, Noise, pooled_noise
from wellfed.study.tune.moves import TuneMachine, built_by, moves
from wellfed.study.tune.trial import Change, TuneTrial, knob_of, with_overrides
from wellfed.study.tune_gain import LEAST_GAIN
from wellfed.units import counted, show_duration, show_factor

_PATIENCE = 3
"""Moves of a kind without a gain since the last kept change, after which the kind is skipped."""
_CONFIDENCE = 0.9975
"""One-sided confidence for keeping a change. A tune compares about ten, and seldom keeps one for noise alone."""
_MOST_RUNS = 3
"""Most measurements of a change that looks better; the best gets one more."""
_HOPELESS_FRAC = 0.35
"""Least gain, relative to its noise, that is measured further."""
_STRUCTURE = ("loader.skip_ids", "loader.max_skipped", "memory.on_oom")
"""Knobs of the turned groups that change which samples come, or what a run survives."""
_PRECISE = ("gpu.precision", "gpu.tf32")
"""Knobs that change every number a little."""
_LEFT_TO_THE_PLAN = "loader.backend=auto"
_TURNED_GROUPS = ("loader", "memory", "gpu")

Again = Callable[[Change, int], TuneTrial]
"""Measures a configuration for the n-th time beyond the first."""


@dataclass
class Step:
    """A configuration that was tried."""

    change: Change
    runs: list[TuneTrial]
    """All its measurements, the first of which is its trial."""
    base: Step | None = None
    """The best that it was compared with; None for the start."""
    is_kept: bool = False
    why: str = ""
    """Why it was kept or dropped."""

    @property
    def trial(self) -> TuneTrial:
        """Its first measurement."""
        return self.runs[0]

    @property
    def figures(self) -> list[float]:
        """Figures of its measurements."""
        return [run.figure for run in self.runs if run.figure is not None]

    @property
    def figure(self) -> float | None:
        """Geometric mean of its figures."""
        return geometric_mean(self.figures) if self.figures else None

    @property
    def before(self) -> float | None:
        """Figure of the best that it was compared with."""
        return None if self.base is None else self.base.figure

    @property
    def gain(self) -> float | None:
        """Factor by which it is better than the best before it; None where one has no figure."""
        return self.figure / self.before if self.figure is not None and self.before is not None else None

    @property
    def is_doubtful(self) -> bool:
        """Whether it looked better than the best, within noise."""
        return not self.is_kept and (self.gain or 0.0) >= LEAST_GAIN

    @property
    def seconds(self) -> float:
        """Duration of its measurements."""
        return math.fsum(run.row.seconds for run in self.runs)

    def to_dict(self) -> dict[str, Any]:
        """Returns the step as ``tune.json`` has it."""
        change, trial = self.change, self.trial
        return {
            "turned": list(change.turned),
            "overrides": list(change.overrides),
            "because": change.because,
            "finding": change.finding,
            "status": trial.row.status,
            "before": self.before,
            "after": self.figure,
            "gain": self.gain,
            "is_kept": self.is_kept,
            "why": self.why,
            "seconds": trial.row.seconds,
        }


@dataclass
class Walk:
    """Steps of a tune: run the `next` change and pass its trial to `judge`, until nothing is proposed."""

    max_trials: int
    """Most trials, the start's included."""
    max_seconds: float
    """Most seconds of all trials and their preparation. No trial is begun that would probably end later."""
    machine: TuneMachine
    steps: list[Step] = field(default_factory=list)
    ended_because: str | None = None
    """Why nothing more is proposed; None while there may be more to try."""

    @property
    def best(self) -> Step | None:
        """The last step that was kept; None where the start is not measured, or could not be."""
        return next((step for step in reversed(self.steps) if step.is_kept), None)

    @property
    def spent_seconds(self) -> float:
        """Duration of all trials so far."""
        return math.fsum(step.seconds for step in self.steps)

    @property
    def used_seconds(self) -> float:
        """Used part of the budget: all trials and their preparation."""
        return self.spent_seconds + math.fsum(step.trial.beside_seconds for step in self.steps)

    def next(self) -> Change | None:
        """Returns what to run next; None: `ended_because` has the reason."""
        if not self.steps:
            return Change((), "the start")
        if (best := self.best) is None:
            self.ended_because = f"the start could not be measured: {self.steps[0].why}"
            return None
        spent = self._spent()
        change = None if spent else next(self._candidates(best), None)
        if change is None and (likely := [step for step in self.steps if step.is_doubtful and step.base is best]):
            likeliest = max(likely, key=lambda step: step.gain or 0.0)
            likeliest.is_kept, likeliest.why = True, f"{likeliest.why}; the best of what was tried"
            return self.next()
        self.ended_because = None if change else spent or "nothing that is left to try is likely to win 2 %"
        return change

    def judge(self, change: Change, trial: TuneTrial, again: Again) -> Step:
        """Returns the step of a change: kept or dropped, after it was measured again as often as it takes."""
        step = Step(change, [trial], base=self.best)
        self.steps.append(step)
        if trial.figure is None:
            step.why = trial.problem
        elif step.base is None:
            step.why, step.is_kept = "the start", True
        else:
            self._compare(step, step.base, again)
        return step

    def _compare(self, step: Step, best: Step, again: Again) -> None:
        """Measures both again until the gain is beyond noise, or no longer likely to be."""
        while True:
            gain, noise = math.log(step.gain or 1.0), self._noise_of_gain(step, best)
            is_hopeless = gain < _HOPELESS_FRAC * noise < math.inf and len(step.runs) > 1
            repeated = best if len(best.runs) <= len(step.runs) else step
            is_enough = len(step.runs) >= _MOST_RUNS and repeated is step
            is_over = self._runs >= self.max_trials or self.used_seconds + step.trial.row.seconds > self.max_seconds
            if gain > noise or gain < math.log(LEAST_GAIN) or is_hopeless or is_enough or is_over:
                break
            trial = again(repeated.change, len(repeated.runs))
            if trial.figure is None:
                break
            repeated.runs.append(trial)
        runs = f", {counted(len(step.runs), 'run')} against {len(best.runs)}"
        if gain < math.log(LEAST_GAIN):
            step.why = "no better" if gain >= -math.log(LEAST_GAIN) else "worse"
        elif gain > noise:
            step.is_kept, step.why = True, f"{show_factor(math.exp(gain))} times as good{runs}"
        else:
            give = "noise unknown" if noise == math.inf else f"give or take {100 * noise:.0f} %"
            step.why = f"within noise: {show_factor(math.exp(gain))} times as good, {give}{runs}"

    def _noise_of_gain(self, step: Step, best: Step) -> float:
        """Returns the half width of the gain's logarithm, by steps within runs and by repeated runs."""
        if (noise := self.noise) is None:
            return math.inf
        within = math.hypot(step.trial.relative_half, best.trial.relative_half)
        between = student_t(noise.degrees, _CONFIDENCE) * noise.relative_sd
        return max(within, between * math.sqrt(1 / len(step.runs) + 1 / len(best.runs)))

    @property
    def noise(self) -> Noise | None:
        """Noise between runs of one configuration; None: none was measured twice."""
        return pooled_noise([MeasuredRun(figure, None) for figure in step.figures] for step in self.steps)

    @property
    def noise_text(self) -> str:
        """A sentence on what repeated runs show."""
        if (noise := self.noise) is None:
            return "Noise between runs: unknown, since no configuration was measured twice."
        return (
            f"Noise between runs of one configuration: {100 * noise.relative_sd:.1f} % (standard deviation, "
            f"{counted(noise.degrees, 'degree')} of freedom); a change is kept only beyond it."
        )

    @property
    def _runs(self) -> int:
        return sum(len(step.runs) for step in self.steps)

    def _spent(self) -> str | None:
        if self._runs >= self.max_trials:
            return f"{counted(self.max_trials, 'trial')} are done, as many as were allowed"
        if self.used_seconds + median(step.trial.row.seconds for step in self.steps) > self.max_seconds:
            return f"another trial would not end within {show_duration(self.max_seconds)}"
        return None

    def _candidates(self, best: Step) -> Iterator[Change]:
        """Yields untried changes, the most promising first."""
        tried = {step.change.turned for step in self.steps if step.base is best or not step.is_doubtful}
        for change in (*self._of_findings(best), *self._of_moves(best)):
            if change.turned and change.turned not in tried:
                yield change

    def _of_findings(self, best: Step) -> Iterator[Change]:
        for found in _in_order(best.trial.record.findings):
            if found["change"] and why_not(found) is None:
                settings = _with_all_of_a_backend(_knob_by_knob(found["change"]))
                yield _behind(best, settings, found["message"], finding=found["id"])

    def _of_moves(self, best: Step) -> Iterator[Change]:
        kinds = [step.change.kind for step in self.steps if step.base is best]
        are_timed = any(step.trial.is_from("loader.backend", "measured") for step in self.steps)
        for move in moves(best.trial, self.machine, backends_are_timed=are_timed):
            if move.bound >= LEAST_GAIN and kinds.count(move.kind) < _PATIENCE:
                yield _behind(best, move.settings, move.because, kind=move.kind)

    @property
    def advice(self) -> list[dict[str, Any]]:
        """Findings of the best configuration that are left to the user, with the reason; each once."""
        left = {
            tuple(found["change"]): {
                "overrides": found["change"],
                "message": found["message"],
                "why_not": reason,
                "changes_learning": found["changes_learning"],
            }
            for found in (() if self.best is None else reversed(self.best.trial.record.findings))
            if found["change"] and (reason := why_not(found))
        }
        return [*left.values()][::-1]


def why_not(found: FindingEntry) -> str | None:
    """Returns why the change of a finding is left to the user; None: tune may try it."""
    knobs = [knob_of(setting) for setting in _knob_by_knob(found["change"])]
    if found["changes_learning"]:
        return "changes what is learned"
    if any(knob.partition(".")[0] == "workload" for knob in knobs):
        return "is about the workload"
    if any(knob in _PRECISE for knob in knobs):
        return "changes the precision of all numbers"
    if any(knob.partition(".")[0] not in _TURNED_GROUPS or knob in _STRUCTURE for knob in knobs):
        return "no knob of the loader, the memory or the GPU"
    return None


def _behind(best: Step, settings: Sequence[str], because: str, **more: str) -> Change:
    """Returns the change with these overrides, without those that leave a knob to the plan that is not set."""
    needed = tuple(
        setting
        for setting in settings
        if not setting.endswith(("=null", "=auto")) or best.trial.asked(knob_of(setting)) not in (None, "auto")
    )
    return Change(with_overrides(best.change.overrides, needed), because, needed, **more)


def _in_order(findings: Sequence[FindingEntry]) -> list[FindingEntry]:
    """Returns the findings in order; leaving the loader to the plan comes first among those about the loader."""
    of_loader = [
        found for found in findings if {knob_of(one).partition(".")[0] for one in found["change"]} == {"loader"}
    ]
    left_first = iter(sorted(of_loader, key=lambda found: _LEFT_TO_THE_PLAN not in _knob_by_knob(found["change"])))
    return [next(left_first) if found in of_loader else found for found in findings]


def _with_all_of_a_backend(settings: Sequence[str]) -> tuple[str, ...]:
    """Returns the overrides; a backend left to the plan leaves all its knobs to the plan."""
    turned = {knob_of(setting) for setting in settings}
    more = built_by("auto", None) if _LEFT_TO_THE_PLAN in settings else ()
    return (*settings, *(setting for setting in more if knob_of(setting) not in turned))


def _knob_by_knob(settings: Sequence[str]) -> tuple[str, ...]:
    """Returns overrides of knobs alone.

    The option loader=auto would also drop what else the start's option sets, such as samples that are left out.
    """
    return tuple(
        part for setting in settings for part in (built_by("auto", None) if setting == "loader=auto" else (setting,))
    )
