"""Writes report.md: what a run did, in the order a reader asks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from wellfed.explain.report.run_sections import ReportSection, sections
from wellfed.record import RunRecord
from wellfed.units import show_text

_ESCAPED = str.maketrans({"<": "&lt;", "|": "\\|", "`": "'", "[": "\\[", "*": "\\*"})


def to_markdown(record: RunRecord, first: Mapping[str, float] | None = None) -> str:
    """The report of a run record.

    Args:
        first: the first value of each metric, where it is known.
    """
    parts = [f"# {_text(record.workload)}: {_text(record.run_id)}"]
    for section in sections(record, first):
        parts += [f"## {section.title}", *_body(section)]
    return "\n\n".join(parts) + "\n"


def _body(section: ReportSection) -> list[str]:
    parts = ["\n".join(f"- {_text(line)}" for line in section.lines)] if section.lines else []
    if section.head and section.rows:
        parts.append(_table(section.head, section.rows))
    return parts or ["None."]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(map(_text, row))} |" for row in rows]
    return "\n".join(lines)


def _text(text: str) -> str:
    """One line that stays text where Markdown is rendered, and reads well where it is not."""
    return " ".join(re.sub(r"&(?=#?\w+;)", "&amp;", show_text(text)).translate(_ESCAPED).split())
