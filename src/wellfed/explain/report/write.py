"""Writes the reports of a run into a folder, ``report.md`` and ``report.html``, and the page of two runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.report.comparison import Comparison
from wellfed.explain.report.finding_pages import page_of_finding
from wellfed.explain.report.run_lines import ReportSection, sections
from wellfed.masking import hidden
from wellfed.record.entries import RunRecord
from wellfed.record.files import write_atomically
from wellfed.units import show_text

_ESCAPED = str.maketrans({"<": "&lt;", "|": "\\|", "`": "'", "[": "\\[", "*": "\\*"})
MARKDOWN, PAGE = "report.md", "report.html"
_LONGEST = 38
"""Characters of a run's name in the name of a file: systems allow 255 bytes in all."""


def write_reports(evidence: Evidence, folder: Path, *, has_page: bool = True) -> None:
    """Writes ``report.md``, then ``report.html``: an error in drawing the page leaves the other file there."""
    write_atomically(folder / MARKDOWN, hidden(to_markdown(evidence.record, evidence.first_metrics, folder)))
    if has_page:
        from wellfed.explain.report.run_page import to_html  # imports Jinja2, which a run needs at its end alone

        write_atomically(folder / PAGE, to_html(evidence, folder))


def write_comparison(both: Comparison, folder: Path, names: Sequence[str]) -> Path:
    """Writes the page of two runs, named after their folders, and returns its path."""
    from wellfed.explain.report.comparison_page import comparison_html  # imports Jinja2

    path = folder / f"comparison_{'_'.join(name[:_LONGEST] for name in names)}.html"
    write_atomically(path, comparison_html(both))
    return path


def to_markdown(record: RunRecord, first: Mapping[str, float] | None = None, folder: Path | None = None) -> str:
    """Returns the report of a run as Markdown; written to ``folder``, it links to the findings' pages."""
    parts = [f"# {_text(record.workload)}: {_text(record.run_id)}"]
    for section in sections(record, first):
        parts += [f"## {section.title}", *_body(section)]
    text = "\n\n".join(parts) + "\n"
    for finding in record.findings:
        if folder is not None and (page := page_of_finding(finding["id"], folder)):
            text = text.replace(f"\n- {finding['id']} (", f"\n- [{finding['id']}]({page}) (")
    return text


def _body(section: ReportSection) -> Iterator[str]:
    if section.lines:
        yield "\n".join(f"- {_text(line)}" for line in section.lines)
    if section.rows:
        head = [f"| {' | '.join(section.head)} |", f"|{'---|' * len(section.head)}"]
        yield "\n".join([*head, *(f"| {' | '.join(map(_text, row))} |" for row in section.rows)])
    if not section.lines and not section.rows:
        yield "None."


def _text(text: str) -> str:
    """Returns one line that is not rendered as Markdown, and is readable as plain text."""
    return " ".join(re.sub(r"&(?=#?\w+;)", "&amp;", show_text(text)).translate(_ESCAPED).split())
