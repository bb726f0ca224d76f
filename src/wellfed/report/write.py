"""Writes the reports of a run into a folder, ``report.md`` and ``report.html``, and the page of two runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from wellfed.diagnosis.evidence import Evidence
from wellfed.record import write_atomically
from wellfed.report.comparison import Comparison
from wellfed.report.comparison_page import comparison_html
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


def write_comparison(both: Comparison, folder: Path, names: Sequence[str]) -> Path:
    """The page of two runs, called by the names of their folders.

    Raises:
        OSError: it can't be written.
    """
    path = folder / f"comparison_{'_'.join(names)}.html"
    write_atomically(path, comparison_html(both))
    return path
