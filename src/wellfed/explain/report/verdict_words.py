"""Names the verdict of a run in a word or two, with its colour, for pages, screens and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from wellfed.record import FindingEntry

_WORDS: Mapping[str, Sequence[str]] = {
    "Starved": (
        *("loading_in_main_process", "too_few_workers", "cpu_bound_loading", "slow_storage", "slow_samples"),
        *("uneven_batches", "slow_handover", "contended_loading", "restarted_workers"),
    ),
    "Copy-bound": ("slow_copy",),
    "Launch-bound": ("launch_bound", "many_tensors", "synchronisation"),
    "Memory-bound": ("memory_bound",),
    "Held up between steps": ("frequent_checkpoints", "frequent_logging", "frequent_validation", "slow_callbacks"),
    "Not to be judged": ("busy_machine",),
    "Too short to judge": ("too_few_steps",),
}
"""Word of the verdict -> findings; others are worded by their id."""
_TONES: Mapping[str, str] = {"healthy": "good", "unknown": "two", "too_few_steps": "two", "busy_machine": "one"}
"""Colours of findings that are verdicts."""
_SEVERE: Mapping[str, str] = {"high": "bad", "medium": "one", "low": "accent", "info": "four"}
_COLOURS: Mapping[str, str] = {"good": "green", "bad": "red", "one": "yellow", "two": "magenta"}
"""Colours of tones on a terminal; others have none."""


def word_of(finding: FindingEntry) -> str:
    """Returns the verdict in a word or two."""
    words = (word for word, ids in _WORDS.items() if finding["id"] in ids and finding["severity"] != "low")
    return next(words, finding["id"].replace("_", " ").capitalize())


def tone_of(finding: FindingEntry) -> str:
    """Returns the name of the colour of a finding."""
    return _TONES.get(finding["id"], _SEVERE.get(finding["severity"], "four"))


def colour_of(finding: str, severity: str) -> str:
    """Returns the colour of a finding on a terminal; empty for none."""
    return _COLOURS.get(_TONES.get(finding, _SEVERE.get(severity, "")), "")
