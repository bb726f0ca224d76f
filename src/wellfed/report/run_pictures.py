"""Draws what a run has left in its tables: utilisation, step time, memory and metrics over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from markupsafe import Markup

from wellfed.diagnosis.evidence import Evidence


def pictures(evidence: Evidence) -> Mapping[str, Sequence[Markup]]:
    """``<svg>`` elements by the name of the section that they belong to."""
    return {}
