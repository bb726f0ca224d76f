"""Decides what tune tries next, and whether a change is kept.

1. The start is measured.
2. The findings of the best configuration so far are tried, the costliest first. Among those about the loader, the one
   that leaves the loader to the plan comes first.
3. Where findings are silent or did not help, a table of moves follows (`moves`).

Tune makes one change at a time and keeps it if it is better beyond noise. After a kept change, the findings of its own
trial lead. The interval of a single run lacks the noise between runs. So a change that looks better is measured again,
and so is the best before it. When nothing is left to try, tune continues with the change that looked best within noise.
Start and result in turns decide at the end.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from wellfed.record.entries import FindingEntry
from wellfed.study.points.guided.change import Change, TuneTrial, knob_of, with_overrides
from wellfed.study.points.guided.gain import LEAST_GAIN
from wellfed.study.points.guided.moves import Move, built_by, moves
from wellfed.study.points.guided.steps import GuidedSteps, Step
from wellfed.units import counted, show_duration, show_factor

_PATIENCE = 3
"""Moves of a kind without a gain since the last kept change, after which the kind is skipped."""
_GROWN = 1.2
"""Factor by which the possible gain of a move, or the best for a finding, must have grown before it is tried again."""
_STRUCTURE = ("loader.skip_ids", "loader.max_skipped", "memory.on_oom")
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
class Advice:
    """A change that tune leaves to its user."""

    overrides: tuple[str, ...]
    message: str
    """Message of the finding."""
    why_not: str
    """Why it was not tried."""
    changes_learning: bool


@dataclass
class GuidedPoints(GuidedSteps):
    """Source of changes: run the `next` one and pass its result to `ended`, until nothing is proposed."""

    ended_because: str | None = None
    """Why nothing more is proposed; None while there may be more to try."""
    _move: Move | None = None
    """Move of the latest proposal; None where none led to it."""
    _in_vain: Counter[str] = field(default_factory=Counter)
    """Moves without a gain since the last kept change, by kind."""
    _bounds: dict[tuple[str, ...], float] = field(default_factory=dict)
    """Possible gain of each move when it was tried, raised by how much worse it was."""

    def next(self) -> Change | None:
        """Returns what to run next, the same until its result is known; None: `ended_because` has the reason."""
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

    def ended(self, change: Change, trial: TuneTrial) -> Step:
        """Takes the result of the proposed change; returns its step."""
        best = self.best
        step = self._first_step(change, trial, best)
        if best is not None and not step.is_out and (step.gain or 0.0) >= LEAST_GAIN:
            step = self._repeated(step, best)
        if (move := self._move) is not None:
            self._bounds[move.settings] = move.bound / min(step.gain or 0.1, 1.0)
            self._in_vain[move.kind] += 1
        if step.is_kept:
            self._in_vain.clear()
        self.steps.append(step)
        return step

    @property
    def advice(self) -> list[Advice]:
        """Findings of the best configuration that were not tried, each once."""
        best = self.best
        if best is None:
            return []
        left = [
            Advice(tuple(found["change"]), found["message"], why_not, found["changes_learning"])
            for found in best.trial.findings
            if found["change"]
            and (why_not := self._why_not(found["change"], changes_learning=found["changes_learning"]))
        ]
        return list({each.overrides: each for each in reversed(left)}.values())[::-1]

    def _spent(self) -> str | None:
        if sum(max(1, len(step.figures)) for step in self.steps) >= self.budget.max_trials:
            return f"{counted(self.budget.max_trials, 'trial')} are done, as many as were allowed"
        usual = median(step.trial.seconds for step in self.steps)
        if self.used_seconds + usual > self.budget.max_seconds:
            return f"another trial would not end within {show_duration(self.budget.max_seconds)}"
        return None

    def _likely(self, best: Step) -> Iterator[tuple[float, int]]:
        """Yields gain and index of each step that looked better than the best, within noise."""
        for index, step in enumerate(self.steps):
            if step.is_doubtful and step.before == best.trial.figure:
                yield step.gain or 0.0, index

    def _doubtful_gain(self, best: Step, group: str | None) -> float:
        """Returns the largest gain within noise of a change in this group alone."""
        gains = [gain for gain, index in self._likely(best) if _group(self.steps[index].change.turned) == group]
        return max(gains, default=1.0)

    def _goes_on_with_the_likeliest(self, best: Step) -> bool:
        """Keeps the step that looked best within noise; returns False where none did.

        Otherwise noise would hide everything that could be found after it. Start and result are compared at the end
        in any case.
        """
        likely = [*self._likely(best)]
        if not likely:
            return False
        gain, index = max(likely)
        why = f"{show_factor(gain)} times as good, within noise: the best of what was tried, so it is gone on with"
        self.steps[index] = replace(self.steps[index], is_kept=True, why=why)
        return True

    def _candidates(self, best: Step) -> Iterator[tuple[Change, Move | None]]:
        """Yields untried changes, the most promising first, each with its move if it comes from the table."""
        for found in _in_order(best.trial.findings):
            if found["change"] and self._why_not(found["change"], changes_learning=found["changes_learning"]) is None:
                settings = self._needed(_with_all_of_a_backend(_knob_by_knob(found["change"])), best.trial)
                if not self._has_won_nothing(settings, best.trial):
                    yield from ((change, None) for change in self._new(best, settings, found["message"], found["id"]))
        measured = [step for step in self.steps if step.trial.is_measured]
        are_timed = any(step.trial.is_timed("loader.backend") for step in measured)
        for move in moves(best.trial, self.machine, backends_are_timed=are_timed):
            is_vain = self._in_vain[move.kind] >= _PATIENCE or move.bound < _GROWN * self._bounds.get(
                move.settings, 0.0
            )
            settings = self._needed(move.settings, best.trial)
            is_free = bool(settings) and self._why_not(settings, changes_learning=False) is None
            has_kept = any(step.change.turned == _FEATURES_KEPT for step in measured)
            is_vain = is_vain or (settings == _FEATURES_PLANNED and has_kept)
            is_vain = is_vain or move.bound < LEAST_GAIN * self._doubtful_gain(best, _group(move.settings))
            if move.bound >= LEAST_GAIN and not is_vain and is_free:
                yield from ((change, move) for change in self._new(best, settings, move.because))
        settings = self._doubtful(best)
        yield from ((change, None) for change in self._new(best, settings, "what looked better within noise, together"))

    def _has_won_nothing(self, settings: tuple[str, ...], trial: TuneTrial) -> bool:
        """Returns whether these overrides won nothing on a configuration about as good as this trial's."""
        tried = [step for step in self.steps if step.change.turned == settings and step.gain is not None]
        if not tried or (tried[-1].gain or 0.0) >= LEAST_GAIN or tried[-1].before is None or trial.figure is None:
            return False
        return trial.figure < _GROWN * tried[-1].before

    def _needed(self, settings: Sequence[str], trial: TuneTrial) -> tuple[str, ...]:
        """Returns the overrides without those that leave a fixed or unset knob to the plan."""
        return tuple(
            setting
            for setting in settings
            if not setting.endswith(("=null", "=auto"))
            or (knob_of(setting) not in self.fixed and trial.asked(knob_of(setting)) not in (None, "auto"))
        )

    def _doubtful(self, best: Step) -> tuple[str, ...]:
        """Returns the overrides of all that looked better within noise: together they may exceed it."""
        settings: list[str] = []
        taken = {knob_of(setting) for setting in best.change.overrides}
        latest = {setting: step for step in self.steps for setting in step.change.turned}
        for step in sorted(self.steps, key=lambda step: -(step.gain or 0.0)):
            knobs = {knob_of(setting) for setting in step.change.turned}
            has_failed = any(
                (latest[setting].gain or 0.0) < LEAST_GAIN for setting in step.change.turned
            )  # at its latest trial
            if step.is_doubtful and not (has_failed or knobs & taken):
                settings, taken = [*settings, *step.change.turned], taken | knobs
        return tuple(settings)

    def _new(self, best: Step, settings: tuple[str, ...], because: str, finding: str | None = None) -> Iterator[Change]:
        """Yields the overrides behind those of the best, unless that equals what was measured before."""
        overrides = with_overrides(best.change.overrides, settings)
        planned = _planned_with(best.trial, settings)
        is_known = planned is not None and self.measured_alike(planned) is not None
        is_known = is_known or any(_has_chosen(step, settings, overrides) for step in self.steps)
        if not is_known and all(set(step.change.overrides) != set(overrides) for step in self.steps):
            yield Change(overrides, because, settings, finding)

    def _why_not(self, settings: Sequence[str], *, changes_learning: bool) -> str | None:
        """Returns why these overrides are left to the user; None: they may be tried."""
        knobs = [knob_of(setting) for setting in _knob_by_knob(settings)]
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


def _group(settings: Sequence[str]) -> str | None:
    """Returns the one group of all knobs; None where there are several."""
    groups = {knob_of(setting).partition(".")[0] for setting in settings}
    return groups.pop() if len(groups) == 1 else None


def _in_order(findings: Sequence[FindingEntry]) -> list[FindingEntry]:
    """Returns the findings in order; leaving the loader to the plan comes first among those about the loader."""
    of_loader = [found for found in findings if _group(found["change"]) == "loader"]
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


def _has_chosen(step: Step, settings: Sequence[str], overrides: Sequence[str]) -> bool:
    """Returns whether the plan of a step that left these knobs open chose these values, all else being equal.

    Args:
        overrides: all overrides, ``settings`` included.
    """
    turned = {knob_of(setting): setting.partition("=")[2] for setting in settings}
    rest = [
        {setting for setting in typed if knob_of(setting) not in turned} for typed in (step.change.overrides, overrides)
    ]
    is_alike = step.trial.is_measured and rest[0] == rest[1]
    return is_alike and all(
        step.trial.asked(knob) in (None, "auto")
        and (text in ("null", "auto") or str(step.trial.value(knob)).lower() == text)
        for knob, text in turned.items()
    )


def _planned_with(trial: TuneTrial, settings: Sequence[str]) -> dict[str, object] | None:
    """Returns the plan expected with these overrides; None where it can't be known before it is made."""
    planned: dict[str, object] = {knob: entry["value"] for knob, entry in trial.plan.items()}
    turned = {knob_of(setting): setting.partition("=")[2] for setting in settings}
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
