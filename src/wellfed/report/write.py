"""Writes the reports of a run into its folder: ``report.md`` and ``report.html``."""

from __future__ import annotations

from pathlib import Path

from wellfed.diagnosis.evidence import Evidence
from wellfed.record import write_atomically
from wellfed.report.run_markdown import to_markdown
from wellfed.report.run_page import to_html

MARKDOWN, PAGE = "report.md", "report.html"


def write_reports(evidence: Evidence, folder: Path, *, has_page: bool = True) -> None:
    """Both files, the page last: what fails in drawing it, which may be anything, leaves the other there.

    Args:
        has_page: whether there is a page.

    Raises:
        OSError: a file can't be written.
    """
    write_atomically(folder / MARKDOWN, to_markdown(evidence.record, evidence.first_metrics))
    if has_page:
        write_atomically(folder / PAGE, to_html(evidence))
