"""Writes the reports of a run into its folder: ``report.md`` and ``report.html``."""

from __future__ import annotations

from pathlib import Path

from wellfed.diagnosis.evidence import Evidence
from wellfed.report.run_markdown import to_markdown
from wellfed.report.run_page import to_html

MARKDOWN, PAGE = "report.md", "report.html"


def write_reports(evidence: Evidence, folder: Path) -> tuple[Path, Path]:
    """Both files, the page last: what fails in drawing it, which may be anything, leaves the other there.

    Raises:
        OSError: a file can't be written.
    """
    markdown, page = folder / MARKDOWN, folder / PAGE
    _write(markdown, to_markdown(evidence.record, evidence.first_metrics))
    _write(page, to_html(evidence))
    return markdown, page


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", errors="backslashreplace")  # a path may hold what is no UTF-8
