"""Writes report.html of a run from its template, ``run_page.html.j2``: figures here, words and marks there."""

from __future__ import annotations

from pathlib import Path

from wellfed.diagnosis.evidence import Evidence
from wellfed.pages.html_page import fill_in
from wellfed.report import run_pictures
from wellfed.report.run_sections import sections


def to_html(evidence: Evidence) -> str:
    """The page. Every text of the user's is escaped."""
    record = evidence.record
    return fill_in(
        Path(__file__).with_name("run_page.html.j2"),
        {
            "record": record,
            "sections": sections(record, evidence.first_metrics),
            "pictures": run_pictures.pictures(evidence),
        },
    )
