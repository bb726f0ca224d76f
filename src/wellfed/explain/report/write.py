"""Writes the reports of a run into a folder, ``report.md`` and ``report.html``, and the page of two runs."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.report.comparison import Comparison
from wellfed.explain.report.comparison_page import comparison_html
from wellfed.explain.report.run_markdown import to_markdown
from wellfed.explain.report.run_page import to_html
from wellfed.masking import hidden
from wellfed.record import write_atomically

MARKDOWN, PAGE = "report.md", "report.html"
_LONGEST = 160
"""Bytes of two names in that of a file: systems take 255 of it all, some of the path."""


def write_reports(evidence: Evidence, folder: Path, *, has_page: bool = True) -> None:
    """Both files, the page last: what fails in drawing it, which may be anything, leaves the other there.

    Args:
        has_page: whether there is a page.

    Raises:
        OSError: a file can't be written.
    """
    write_atomically(folder / MARKDOWN, hidden(to_markdown(evidence.record, evidence.first_metrics)))
    if has_page:
        write_atomically(folder / PAGE, hidden(to_html(evidence, folder)))


def write_comparison(both: Comparison, folder: Path, names: Sequence[str]) -> Path:
    """The page of two runs, called by the names of their folders.

    Raises:
        OSError: it can't be written.
    """
    path = folder / f"comparison_{_pair(both, names)}.html"
    write_atomically(path, comparison_html(both))
    return path


def _pair(both: Comparison, names: Sequence[str]) -> str:
    """Returns a name for two runs, with workloads if the names are alike; a digest replaces the end of long ones."""
    if len(set(names)) < len(names):
        workloads = [re.sub(r"\W", "_", record.workload) for record in both.records]
        names = [f"{workload}_{name}" for workload, name in zip(workloads, names, strict=True)]
    whole = "_".join(names)
    if len(os.fsencode(whole)) <= _LONGEST:
        return whole
    cut = (os.fsencode(name)[: _LONGEST // 2].decode(errors="ignore") for name in names)
    return f"{'_'.join(cut)}_{hashlib.sha256(os.fsencode(whole)).hexdigest()[:8]}"
