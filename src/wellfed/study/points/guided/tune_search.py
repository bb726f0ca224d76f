"""Decides what tune tries next, and whether a change is kept.

1. The start is measured.
2. The findings of the best configuration so far are tried, the costliest first. Among those about the loader, the one
   that leaves the loader to the plan comes first.
3. Where findings are silent or did not help, a table of moves follows (`moves`).

Tune makes one change at a time and keeps it if it is better beyond noise. After a kept change, the findings of its own
trial lead. A change that looks better is measured again, and so is the best that it is compared with, since the
interval of a single run lacks the noise between runs. When nothing is left to try, tune goes on with the change that
looked best within noise; start and result in turns decide at the end.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from wellfed.observe.timing.interval import student_t
from wellfed.record import FindingEntry
from wellfed.study.objective import PEAK_MEMORY, Objective
from wellfed.study.points.guided.gain import LEAST_GAIN
from wellfed.study.points.guided.moves import Move, TuneMachine, built_by, moves
from wellfed.study.points.guided.tune_trial import Change, Knobs, TuneTrial, knob_of, same_plan, typed_behind
from wellfed.study.repeats import MeasuredRun, Noise, pooled_noise
from wellfed.units import counted, show_duration, show_factor

_UNKNOWN_FRAC = 0.03
"""Half width of a figure without an interval, relative to the figure."""
_CONFIDENCE = 0.9975
"""One-sided confidence for keeping a change. A tune compares about ten, and seldom keeps one for noise alone."""
_MOST_RUNS = 3
"""Most measurements of a change that looks better; the best gets one more."""
_HOPELESS_FRAC = 0.35
"""Least gain, relative to its noise, that is measured further."""
_PATIENCE = 3
"""Moves of a kind without a gain since the last kept change, after which the kind is skipped."""
_GROWN = 1.2
"""Factor by which the possible gain of a move, or the best for a finding, must have grown before it is tried again."""
_STRUCTURE = ("loader.shuffle_buffer", "loader.skip_ids", "loader.max_skipped", "memory.on_oom")
"""Knobs of the turned groups that change which samples come, or what a run survives."""
_PRECISE = ("gpu.precision", "gpu.tf32")
"""Knobs that change every number a little."""
_SPLIT = ("memory.micro_batch", "memory.accumulate")
"""Knobs that follow from each other."""
_ALSO_CHANGES = {"loader.backend": "loader.num_workers", **dict(zip(_SPLIT, reversed(_SPLIT), strict=True))}
"""Knobs that another knob decides as well."""
_FEATURES_KEPT, _FEATURES_PLANNED = ("memory.features=cache",), ("memory.features=null",)
"""Two ways to the same: the plan keeps features, too, where they fit."""
_LEFT_TO_THE_PLAN = "loader.backend=auto"
_FOR_WORKERS = ("loader.num_workers", "loader.prefetch_factor", "loader.persistent_workers")
_TURNED_GROUPS = ("loader", "memory", "gpu")


@dataclass(frozen=True)
class TuneBudget:
    """Limits of a tune."""

    max_trials: int
    """Most trials, the start's included."""
    max_seconds: float
    """Most seconds of all trials and their preparation. No trial is begun that would probably end later."""


@dataclass(frozen=True)
class Advice:
    """A change that tune leaves to its user."""

    overrides: tuple[str, ...]
    message: str
    """Message of the finding."""
    why_not: str
    """Why it was not tried."""
    changes_learning: bool


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


@dataclass
class TuneSearch:
    """A search: `propose` a change, run it, `tell` the result, until nothing is proposed."""

    objective: Objective
    budget: TuneBudget
    around: TuneMachine
    fixed: frozenset[str] = frozenset()
    """Knobs and groups that are never turned: ``loader.num_workers``, ``memory``."""
    again: Callable[[Change, int], TuneTrial] | None = None
    """Measures a configuration for the n-th time beyond the first. None: the intervals of single runs decide."""
    steps: list[Step] = field(default_factory=list)
    ended_because: str | None = None
    """Why nothing more is proposed; None while there may be more to try."""
    _move: Move | None = None
    """Move of the latest proposal; None where none led to it."""
    _in_vain: Counter[str] = field(default_factory=Counter)
    """Moves without a gain since the last kept change, by kind."""
    _bounds: dict[tuple[str, ...], float] = field(default_factory=dict)
    """Possible gain of each move when it was tried, raised by how much worse it was."""

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

    @property
    def noise(self) -> Noise | None:
        """Noise between runs of one configuration; None where none was measured twice."""
        return self._noise_with()

    @property
    def noise_in_words(self) -> str:
        """A sentence on what repeated runs show."""
        if (noise := self.noise) is None:
            return "Noise between runs: unknown, since no configuration was measured twice."
        repeated = sum(len(step.figures) for step in self.steps if len(step.figures) > 1)
        return (
            f"Noise between runs of one configuration: {100 * noise.relative_sd:.1f} % (standard deviation, of "
            f"{repeated} runs, {counted(noise.degrees, 'degree')} of freedom); a change is kept only beyond it."
        )

    def _noise_with(self, *more: Step) -> Noise | None:
        runs = ([MeasuredRun(figure, None) for figure in step.figures] for step in (*self.steps, *more))
        return pooled_noise(runs)

    @property
    def used_seconds(self) -> float:
        """Used part of the budget: all trials and their preparation."""
        return self.spent_seconds + math.fsum(step.trial.beside_seconds for step in self.steps)

    def propose(self) -> Change | None:
        """Returns what to run next, the same until its result is told; None: `ended_because` has the reason."""
        if not self.steps and self.budget.max_trials > 0:
            return Change((), "the start")
        change, self._move, said = None, None, "nothing that is left to try is likely to win 2 %"
        if self.best is None:
            said = f"the start could not be measured: {self.steps[0].why}" if self.steps else "no trial is allowed"
        while (best := self.best) is not None:
            spent = self._spent()
            if spent is None:
                change, self._move = next(self._candidates(best), (None, None))
            if change is not None or not self._goes_on_with_the_likeliest(best):
                said = spent or said
                break
        self.ended_because = said if change is None else None
        return change

    def tell(self, change: Change, trial: TuneTrial) -> Step:
        """Takes the result of the proposed change; returns its step."""
        best = self.best
        step = self._judged(change, trial, best)
        if best is not None and not step.is_out and (step.gain or 0.0) >= LEAST_GAIN:
            step = self._sure(step, best)
        if (move := self._move) is not None:
            self._bounds[move.words] = move.bound / min(step.gain or 0.1, 1.0)
            self._in_vain[move.kind] += 1
        if step.is_kept:
            self._in_vain.clear()
        self.steps.append(step)
        return step

    def measured_alike(self, plan: Mapping[str, object]) -> Step | None:
        """Returns the step whose plan equals a plan of these values; None where there is none."""
        wanted = same_plan(plan)
        return next((step for step in self.steps if step.trial.plan and _plan_of(step.trial) == wanted), None)

    @property
    def advice(self) -> list[Advice]:
        """Findings of the best configuration that were not tried, each once."""
        best = self.best
        if best is None:
            return []
        told = [
            Advice(tuple(found["change"]), found["message"], why_not, found["changes_learning"])
            for found in best.trial.findings
            if found["change"]
            and (why_not := self._why_not(found["change"], changes_learning=found["changes_learning"]))
        ]
        return list({each.overrides: each for each in reversed(told)}.values())[::-1]

    def _spent(self) -> str | None:
        if sum(max(1, len(step.figures)) for step in self.steps) >= self.budget.max_trials:
            return f"{counted(self.budget.max_trials, 'trial')} are done, as many as were allowed"
        usual = median(step.trial.seconds for step in self.steps)
        if self.used_seconds + usual > self.budget.max_seconds:
            return f"another trial would not end within {show_duration(self.budget.max_seconds)}"
        return None

    def _likely(self, best: Step) -> Iterator[tuple[float, int]]:
        """Yields gain and index of each step that looked better than the best, within noise."""
        for place, step in enumerate(self.steps):
            if step.is_doubtful and step.before == best.trial.figure:
                yield step.gain or 0.0, place

    def _doubtful_gain(self, best: Step, group: str | None) -> float:
        """Returns the largest gain within noise of a change in this group alone."""
        gains = [gain for gain, place in self._likely(best) if _group(self.steps[place].change.turned) == group]
        return max(gains, default=1.0)

    def _goes_on_with_the_likeliest(self, best: Step) -> bool:
        """Keeps the step that looked best within noise; returns False where none did.

        Otherwise noise would hide everything that could be found after it. Start and result are compared at the end
        in any case.
        """
        likely = [*self._likely(best)]
        if not likely:
            return False
        gain, place = max(likely)
        why = f"{show_factor(gain)} times as good, within noise: the best of what was tried, so it is gone on with"
        self.steps[place] = replace(self.steps[place], is_kept=True, why=why)
        return True

    def _candidates(self, best: Step) -> Iterator[tuple[Change, Move | None]]:
        """Yields untried changes, the most promising first, each with its move if it comes from the table."""
        for found in _in_order(best.trial.findings) if self.objective is not PEAK_MEMORY else ():
            if found["change"] and self._why_not(found["change"], changes_learning=found["changes_learning"]) is None:
                words = self._needed(_with_all_of_a_backend(_knob_by_knob(found["change"])), best.trial)
                if not self._has_won_nothing(words, best.trial):
                    yield from ((change, None) for change in self._new(best, words, found["message"], found["id"]))
        for move in moves(best.trial, self.around, self.objective, backends_are_timed=self._backends_are_timed):
            is_vain = self._in_vain[move.kind] >= _PATIENCE or move.bound < _GROWN * self._bounds.get(move.words, 0.0)
            words = self._needed(move.words, best.trial)
            is_free = bool(words) and self._why_not(words, changes_learning=False) is None
            is_vain = is_vain or (words == _FEATURES_PLANNED and self._has_tried(_FEATURES_KEPT))
            is_vain = is_vain or move.bound < LEAST_GAIN * self._doubtful_gain(best, _group(move.words))
            if move.bound >= LEAST_GAIN and not is_vain and is_free:
                yield from ((change, move) for change in self._new(best, words, move.because))
        words = self._doubtful(best)
        yield from ((change, None) for change in self._new(best, words, "what looked better within noise, together"))

    def _has_won_nothing(self, words: tuple[str, ...], trial: TuneTrial) -> bool:
        """Returns whether these overrides won nothing on a configuration about as good as this trial's."""
        tried = [step for step in self.steps if step.change.turned == words and step.gain is not None]
        if not tried or (tried[-1].gain or 0.0) >= LEAST_GAIN or tried[-1].before is None or trial.figure is None:
            return False
        return self.objective.goodness(trial.figure) < _GROWN * self.objective.goodness(tried[-1].before)

    @property
    def _backends_are_timed(self) -> bool:
        """Whether a plan has timed the backends, so that the fastest was tried."""
        return any(step.trial.is_timed("loader.backend") for step in self.steps if step.trial.is_measured)

    def _has_tried(self, words: tuple[str, ...]) -> bool:
        return any(step.change.turned == words and step.trial.is_measured for step in self.steps)

    def _needed(self, words: Sequence[str], trial: TuneTrial) -> tuple[str, ...]:
        """Returns the overrides without those that leave a fixed or unset knob to the plan."""
        return tuple(
            word
            for word in words
            if not word.endswith(("=null", "=auto"))
            or (knob_of(word) not in self.fixed and trial.asked(knob_of(word)) not in (None, "auto"))
        )

    def _doubtful(self, best: Step) -> tuple[str, ...]:
        """Returns the overrides of all that looked better within noise: together they may exceed it."""
        words: list[str] = []
        taken = {knob_of(word) for word in best.change.overrides}
        latest = {word: step for step in self.steps for word in step.change.turned}
        for step in sorted(self.steps, key=lambda step: -(step.gain or 0.0)):
            knobs = {knob_of(word) for word in step.change.turned}
            has_failed = any(
                (latest[word].gain or 0.0) < LEAST_GAIN for word in step.change.turned
            )  # at its latest trial
            if step.is_doubtful and not (has_failed or knobs & taken):
                words, taken = [*words, *step.change.turned], taken | knobs
        return tuple(words)

    def _new(self, best: Step, words: tuple[str, ...], because: str, finding: str | None = None) -> Iterator[Change]:
        """Yields the overrides behind those of the best, unless that equals what was measured before."""
        overrides = typed_behind(best.change.overrides, words)
        planned = _planned_with(best.trial, words)
        is_known = planned is not None and self.measured_alike(planned) is not None
        is_known = is_known or any(_has_chosen(step, words, overrides) for step in self.steps)
        if not is_known and all(set(step.change.overrides) != set(overrides) for step in self.steps):
            yield Change(overrides, because, words, finding)

    def _why_not(self, words: Sequence[str], *, changes_learning: bool) -> str | None:
        """Returns why these overrides are left to the user; None: they may be tried."""
        knobs = [knob_of(word) for word in _knob_by_knob(words)]
        if changes_learning:
            return "changes what is learned"
        if any(knob.partition(".")[0] == "workload" for knob in knobs):
            return "is about the workload"
        touched = dict.fromkeys(each for knob in knobs for each in (knob, _ALSO_CHANGES.get(knob, knob)))
        if held := [knob for knob in touched if knob in self.fixed or knob.partition(".")[0] in self.fixed]:
            return f"{' and '.join(held)} {'is' if len(held) == 1 else 'are'} fixed"
        if any(knob in _PRECISE for knob in knobs):
            return "changes the precision of all numbers"
        if any(knob.partition(".")[0] not in _TURNED_GROUPS or knob in _STRUCTURE for knob in knobs):
            return "no knob of the loader, the memory or the GPU"
        return None

    def _judged(self, change: Change, trial: TuneTrial, best: Step | None) -> Step:
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

    def _sure(self, step: Step, best: Step) -> Step:
        """Returns the judged step, after it and the best were measured again as often as it takes."""
        place = self.steps.index(best)
        while self.again is not None:
            best = self.steps[place]
            noise = self._noise_of(step, best)
            gain = math.log(step.gain or 1.0)
            is_hopeless = gain < _HOPELESS_FRAC * noise < math.inf and len(step.figures) > 1
            if gain > noise or gain < math.log(LEAST_GAIN) or is_hopeless:
                break
            is_bests_turn = len(best.figures) <= len(step.figures)
            if (len(step.figures) >= _MOST_RUNS and not is_bests_turn) or self._runs_left(step) <= 0:
                break
            more = self._measured_again(best if is_bests_turn else step)
            if more is None:
                break
            if is_bests_turn:
                self._replace_best(place, more)
                best = more
            else:
                step = more
            step = self._compared(step, best)
        return self._compared(step, self.steps[place])

    def _runs_left(self, step: Step) -> int:
        """Returns the number of runs left in the budget."""
        done = sum(max(1, len(each.figures)) for each in (*self.steps, step))
        is_time_left = self.used_seconds + 2 * step.trial.seconds <= self.budget.max_seconds
        return self.budget.max_trials - done if is_time_left else 0

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

    def _replace_best(self, place: int, best: Step) -> None:
        """Replaces the best by its new figure; compares again what was compared with the old one."""
        old = self.steps[place].trial.figure
        self.steps[place] = best
        for at, step in enumerate(self.steps):
            if step.before == old and not step.is_kept and step.trial.figure is not None:
                self.steps[at] = replace(step, before=best.trial.figure, gain=self._gain(step.trial, best))

    def _gain(self, trial: TuneTrial, best: Step) -> float:
        assert trial.figure is not None
        assert best.trial.figure is not None
        return self.objective.goodness(trial.figure) / self.objective.goodness(best.trial.figure)

    def _noise_of(self, step: Step, best: Step) -> float:
        """Returns the half width of the gain's logarithm, by steps within runs and by repeated runs."""
        counts = [max(1, len(each.figures)) for each in (step, best)]
        within = math.hypot(*(_relative_half(each.trial) for each in (step, best)))
        if self.again is None:
            return within
        noise = self._noise_with(step)
        if noise is None:
            return math.inf
        between = student_t(noise.degrees, _CONFIDENCE) * noise.relative_sd * math.sqrt(sum(1 / n for n in counts))
        return max(within, between)

    def _compared(self, step: Step, best: Step) -> Step:
        """Returns the step compared with the best; it is kept where it is better beyond noise."""
        gain, noise = self._gain(step.trial, best), self._noise_of(step, best)
        runs = f", {len(step.figures)} runs against {len(best.figures)}" if self.again is not None else ""
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


def _group(words: Sequence[str]) -> str | None:
    """Returns the one group of all knobs; None where there are several."""
    groups = {knob_of(word).partition(".")[0] for word in words}
    return groups.pop() if len(groups) == 1 else None


def _in_order(findings: Sequence[FindingEntry]) -> list[FindingEntry]:
    """Returns the findings in order; leaving the loader to the plan comes first among those about the loader."""
    of_loader = [found for found in findings if _group(found["change"]) == "loader"]
    left_first = iter(sorted(of_loader, key=lambda found: _LEFT_TO_THE_PLAN not in _knob_by_knob(found["change"])))
    return [next(left_first) if found in of_loader else found for found in findings]


def _with_all_of_a_backend(words: Sequence[str]) -> tuple[str, ...]:
    """Returns the overrides; a backend left to the plan leaves all its knobs to the plan."""
    turned = {knob_of(word) for word in words}
    more = built_by("auto", None) if _LEFT_TO_THE_PLAN in words else ()
    return (*words, *(word for word in more if knob_of(word) not in turned))


def _knob_by_knob(words: Sequence[str]) -> tuple[str, ...]:
    """Returns overrides of knobs alone.

    The option loader=auto would also drop what else the start's option sets, such as samples that are left out.
    """
    return tuple(part for word in words for part in (built_by("auto", None) if word == "loader=auto" else (word,)))


def _relative_half(trial: TuneTrial) -> float:
    """Returns half of the 95 % interval relative to the figure."""
    if trial.ci95 is None or not trial.figure:
        return _UNKNOWN_FRAC
    return (trial.ci95[1] - trial.ci95[0]) / 2 / trial.figure


def _plan_of(trial: TuneTrial) -> Knobs:
    return same_plan({knob: entry["value"] for knob, entry in trial.plan.items()})


def _unplanned(change: Change) -> Iterator[str]:
    """Yields overrides of knobs that no plan has, in which two equal plans may differ."""
    return (word for word in change.overrides if knob_of(word) in ("gpu.channels_last", "gpu.cudnn_benchmark"))


def _has_chosen(step: Step, words: Sequence[str], overrides: Sequence[str]) -> bool:
    """Returns whether the plan of a step that left these knobs open chose these values, all else being equal.

    Args:
        overrides: all overrides, ``words`` included.
    """
    turned = {knob_of(word): word.partition("=")[2] for word in words}
    rest = [{word for word in typed if knob_of(word) not in turned} for typed in (step.change.overrides, overrides)]
    is_alike = step.trial.is_measured and rest[0] == rest[1]
    return is_alike and all(
        step.trial.asked(knob) in (None, "auto")
        and (text in ("null", "auto") or str(step.trial.value(knob)).lower() == text)
        for knob, text in turned.items()
    )


def _planned_with(trial: TuneTrial, words: Sequence[str]) -> dict[str, object] | None:
    """Returns the plan expected with these overrides; None where it can't be known before it is made."""
    planned: dict[str, object] = {knob: entry["value"] for knob, entry in trial.plan.items()}
    turned = {knob_of(word): word.partition("=")[2] for word in words}
    if not turned.keys() <= planned.keys():
        return None
    if turned.get("loader.backend") == "inline":  # knobs of workers do nothing
        turned = {
            "loader.num_workers": "0",
            **{knob: text for knob, text in turned.items() if knob not in _FOR_WORKERS},
        }
    if any(text in ("null", "auto") and trial.is_set(knob) and knob not in _SPLIT for knob, text in turned.items()):
        return None
    for knob, text in turned.items():
        if text not in ("null", "auto"):
            planned[knob] = {"true": True, "false": False}.get(text, text)
    micro, parts = (turned.get(knob, "null") for knob in _SPLIT)
    share = math.ceil(int(trial.value("workload.effective_batch_size") or 1) / int(trial.value("trainer.devices") or 1))
    if micro.isdigit():
        planned["memory.accumulate"] = math.ceil(share / int(micro))
    elif parts.isdigit():
        planned["memory.micro_batch"] = math.ceil(share / int(parts))
    elif turned.keys() & set(_SPLIT):
        return None
    return planned
