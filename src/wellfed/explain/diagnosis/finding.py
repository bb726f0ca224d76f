"""Defines a finding of the diagnosis: words, figures, overrides, predicted gain, and the word of its verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from wellfed.explain.diagnosis.thresholds import WAIT_FRAC, WORTH_FRAC
from wellfed.explain.diagnosis.words import Figures, rendered, template
from wellfed.record.entries import FindingEntry
from wellfed.units import show_factor

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

    @classmethod
    def of_time(cls, won_frac: float, low_frac: float, high_frac: float) -> Gain:
        """Returns the gain from shares of the time that are won back."""
        low, mid, high = sorted(min(0.99, max(0.0, share)) for share in (low_frac, won_frac, high_frac))
        return cls(1 / (1 - mid), 1 / (1 - low), 1 / (1 - high))

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
    """Id of the rule: its name in `wellfed.explain.diagnosis.rules`, and that of its words in ``findings.toml``."""
    message: str
    """One or two sentences with the figures in them, without advice, overrides and gain."""
    evidence: Mapping[str, float | int | str | None]
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
    for_script: tuple[str, str] | None = field(default=None, kw_only=True)
    """Message and advice for a watched script; None = as for a run."""
    is_of_training: bool = field(default=False, kw_only=True)
    """Whether its text says that the gain is of all of training, as its steps, of which the rate is, are but a part."""
    is_note: bool = field(default=False, kw_only=True)
    """Whether it is information instead of a cause of lost time."""

    @property
    def time_lost_frac(self) -> float:
        """Share of training's time that a change would win back; 0 if unknown."""
        gained_frac = 0.0 if self.gain is None else self.gain.lost_frac
        return gained_frac if self.lost_frac is None else self.lost_frac

    @property
    def severity(self) -> Severity:
        """Severity by the share of time lost."""
        if self.is_note:
            return "info"
        lost_frac = self.time_lost_frac
        return "high" if lost_frac >= _HIGH_FRAC else "medium" if lost_frac >= WORTH_FRAC else "low"

    @property
    def expected(self) -> str:
        """Predicted gain as text; empty without one."""
        if self.gain is None:
            return ""
        low, high = show_factor(self.gain.low), show_factor(self.gain.high)
        if float(low) <= 1:
            return "gain uncertain"
        bounds = "" if low == high else f" ({low} to {high})"
        whole = " for all of training" if self.is_of_training else ""
        return f"about {show_factor(self.gain.factor)} times as fast{bounds}{whole}, predicted"

    @property
    def text(self) -> str:
        """Message, advice, overrides and gain in one line."""
        gain = f", {self.expected}" if self.gain else ""
        way_out = f"Try: {' '.join(self.change)}{gain}." if self.change else f"Without it{gain}." if gain else ""
        learning = LEARNING if self.change and self.changes_learning else ""
        return " ".join(filter(None, (self.message, self.advice, way_out, learning)))

    def entry(self) -> FindingEntry:
        """Returns the entry of ``findings`` in run.json."""
        return {
            "id": self.id,
            "severity": self.severity,
            "message": self.message,
            "advice": self.advice,
            "evidence": dict(self.evidence),
            "change": list(self.change),
            "changes_learning": self.changes_learning,
            "gain": self.gain and {**asdict(self.gain), "text": self.expected},  # type: ignore[typeddict-item]
            "text": self.text,
        }


def found(name: str, figures: Figures, change: Sequence[str] = (), *, case: str = "", **fields: Any) -> Finding:
    """Returns a finding in the words of ``findings.toml``, for a run and for a script.

    Args:
        figures: recorded with the finding, but for missing ones, and those of words alone, which begin with ``_``.
        case: table of words below that of the finding.
        fields: further fields of `Finding`. ``advice`` replaces that of the table.
    """

    def say(key: str, for_script: bool) -> str:
        return rendered(template(name, key, case, for_script=for_script), figures)

    given = fields.pop("advice", "")
    texts = []
    for for_script in (False, True):
        advice = given or "".join(say(key, for_script) for key in ("advice", *(() if change else ("otherwise",))))
        texts.append((say("message", for_script), advice))
    (message, advice), for_script_ = texts
    evidence = {key: value for key, value in figures.items() if key[0] != "_" and value is not None}
    return Finding(name, message, evidence, tuple(change), advice=advice, for_script=for_script_, **fields)


_COLOURS: Mapping[str, tuple[str, str]] = {
    **{"healthy": ("good", "green"), "unknown": ("two", "magenta"), "too_few_steps": ("two", "magenta")},
    **{"high": ("bad", "red"), "medium": ("one", "yellow"), "low": ("accent", ""), "info": ("four", "")},
}
"""Finding that is a verdict, or severity of another -> colour on a page, colour on a terminal."""


def word_of(finding: FindingEntry) -> str:
    """Returns the verdict in a word or two."""
    case = "waits" if "wait_frac" in finding["evidence"] else ""
    return template(finding["id"], "word", case) or finding["id"].replace("_", " ").capitalize()


def tone_of(finding: FindingEntry) -> str:
    """Returns the name of the colour of a finding."""
    return _COLOURS.get(finding["id"], _COLOURS[finding["severity"]])[0]


def colour_of(finding: str, severity: str) -> str:
    """Returns the colour of a finding on a terminal; empty for none."""
    return _COLOURS.get(finding, _COLOURS.get(severity, ("", "")))[1]
