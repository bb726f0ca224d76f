"""Asks every rule for its finding about a run, and orders them by the time that they would win back."""

from __future__ import annotations

from collections.abc import Callable

from wellfed.diagnosis.evidence import Evidence
from wellfed.diagnosis.finding import Finding
from wellfed.diagnosis.rules import healthy, loss_blows_up, machine_was_slower, too_few_steps

Rule = Callable[[Evidence], Finding | None]
RULES: tuple[Rule, ...] = (
    loss_blows_up.check,
    machine_was_slower.check,
)
"""In any order: each decides from the evidence alone."""


def judge(evidence: Evidence) -> list[Finding]:
    """What is known of a run, the costliest first; where nothing is lost, that it is healthy, or can't be judged."""
    found = [finding for rule in RULES if (finding := rule(evidence)) is not None]
    found.sort(key=lambda finding: (finding.is_note, -finding.time_lost_frac))
    if any(not finding.is_note for finding in found):
        return found
    return [too_few_steps.check(evidence) or healthy.check(evidence), *found]
