"""Defines a finding of the diagnosis: message, figures, overrides, predicted gain, and the word of its verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from wellfed.explain.diagnosis.thresholds import WAIT_FRAC, WORTH_FRAC
from wellfed.record.entries import FindingEntry
from wellfed.units import show_factor, show_percent

Figures = dict[str, float | int | str]
"""Figures behind a finding, by name, with units in the names."""
PROFILE = "debug=profiler shows what the time is spent on."
"""Advice if nothing that was measured names the cause."""
LEARNING = "This changes what is learned."
"""End of a finding whose overrides change it."""
Severity = Literal["high", "medium", "low", "info"]
"""Share of time lost: at least a third, at least a tenth, less. ``info`` = no time lost."""
_HIGH_FRAC = 1 / 3


def waiting_colour(wait_frac: float) -> str:
    """Returns the colour of a terminal for a share of the steps that waits for data."""
    return "green" if wait_frac <= WAIT_FRAC else "red" if wait_frac >= _HIGH_FRAC else "yellow"


@dataclass(frozen=True)
class Gain:
    """Expected factor on the rate, with its bounds; 1 = no gain."""

    factor: float
    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.factor <= self.high:
            raise ValueError(f"a gain of {self.factor} is not between {self.low} and {self.high}")

    @property
    def lost_frac(self) -> float:
        """Share of the current time that would be won back."""
        return max(0.0, 1 - 1 / self.factor)

    def within(self, frac: float) -> Gain:
        """Returns the gain of the whole of which this one speeds up the share ``frac``."""
        factor, low, high = (1 / (1 - frac + frac / one) for one in (self.factor, self.low, self.high))
        return Gain(factor, low, high)


@dataclass(frozen=True)
class Finding:
    """Cause of lost time, or a note."""

    id: str
    """Id of the rule: its name in `wellfed.explain.diagnosis.rules`."""
    message: str
    """One or two sentences with the figures in them, without advice, overrides and gain."""
    evidence: Mapping[str, float | int | str]
    change: tuple[str, ...] = ()
    """Overrides that remove the cause, to add after those of the run; empty if no knob does."""
    changes_learning: bool = False
    """Whether the overrides change what is learned. Such advice is never applied automatically."""
    gain: Gain | None = None
    """Predicted gain; None if unknown, or if there is none."""
    lost_frac: float | None = None
    """Share of training's time that the cause costs; None = by the gain, or unknown."""
    advice: str = field(default="", kw_only=True)
    """Sentences on what to do where no override does it."""
    is_note: bool = field(default=False, kw_only=True)
    """Whether it is information instead of a cause of lost time."""
    steps_frac: float | None = field(default=None, kw_only=True)
    """Share of training in its steps, if gain and loss refer to steps alone; None = to all of it."""

    @property
    def time_lost_frac(self) -> float:
        """Share of training's time that a change would win back; 0 if unknown."""
        gained_frac = 0.0 if self.gain is None else self.gain.lost_frac
        lost_frac = gained_frac if self.lost_frac is None else self.lost_frac
        return lost_frac if self.steps_frac is None else lost_frac * self.steps_frac

    @property
    def severity(self) -> Severity:
        """Severity by the share of time lost."""
        if self.is_note:
            return "info"
        lost_frac = self.time_lost_frac
        return "high" if lost_frac >= _HIGH_FRAC else "medium" if lost_frac >= WORTH_FRAC else "low"

    @property
    def text(self) -> str:
        """Message, advice, overrides and gain in one line."""
        parts = [self.message, self.advice]
        if self.change:
            parts.append(f"Try: {' '.join(self.change)}{_expected(self.gain, self.steps_frac)}.")
        elif self.gain is not None:
            parts.append(f"Without it{_expected(self.gain, self.steps_frac)}.")
        if self.change and self.changes_learning:
            parts.append(LEARNING)
        return " ".join(filter(None, parts))

    def entry(self) -> FindingEntry:
        """Returns the entry of ``findings`` in run.json."""
        gain = self.gain
        return {
            "id": self.id,
            "severity": self.severity,
            "message": self.message,
            "advice": self.advice,
            "evidence": dict(self.evidence),
            "change": list(self.change),
            "changes_learning": self.changes_learning,
            "gain": None if gain is None else {"factor": gain.factor, "low": gain.low, "high": gain.high},
            "text": self.text,
        }


def _expected(gain: Gain | None, steps_frac: float | None) -> str:
    if gain is None:
        return ""
    low, high = show_factor(gain.low), show_factor(gain.high)
    if float(low) <= 1:
        return ", gain uncertain"
    bounds = "" if low == high else f" ({low} to {high})"
    if steps_frac is None:
        return f", about {show_factor(gain.factor)} times as fast{bounds}, predicted"
    steps = f"its steps, {show_percent(steps_frac)} of training, start and end left out"
    return f", about {show_factor(gain.factor)} times as fast{bounds} in {steps}, predicted"


_STARVED = (
    *("loading_in_main_process", "too_few_workers", "cpu_bound_loading", "slow_storage", "slow_samples"),
    *("uneven_batches", "slow_handover", "contended_loading", "restarted_workers"),
)
_HELD_UP = ("frequent_checkpoints", "frequent_logging", "frequent_validation", "slow_callbacks")
_WORDS: Mapping[str, str] = {
    **dict.fromkeys(_STARVED, "Starved"),
    **dict.fromkeys(_HELD_UP, "Held up"),
    **{"healthy": "Fed", "too_few_steps": "Too short", "slow_copy": "Copy-bound", "memory_bound": "Memory-bound"},
    **{"launch_bound": "Launch-bound", "synchronisation": "Launch-bound"},
}
"""Finding -> word of the verdict; others are worded by their id."""
_COLOURS: Mapping[str, tuple[str, str]] = {
    **{"healthy": ("good", "green"), "unknown": ("two", "magenta"), "too_few_steps": ("two", "magenta")},
    **{"high": ("bad", "red"), "medium": ("one", "yellow"), "low": ("accent", ""), "info": ("four", "")},
}
"""Finding that is a verdict, or severity of another -> colour on a page, colour on a terminal."""


def word_of(finding: FindingEntry) -> str:
    """Returns the verdict in a word or two."""
    name = finding["id"]
    if name == "unexplained":
        return "Starved" if "wait_frac" in finding["evidence"] else "Held up"
    return _WORDS.get(name, name.replace("_", " ").capitalize())


def tone_of(finding: FindingEntry) -> str:
    """Returns the name of the colour of a finding."""
    return _COLOURS.get(finding["id"], _COLOURS[finding["severity"]])[0]


def colour_of(finding: str, severity: str) -> str:
    """Returns the colour of a finding on a terminal; empty for none."""
    return _COLOURS.get(finding, _COLOURS.get(severity, ("", "")))[1]
