"""Writes report.html of a run from its template, ``run_page.html.j2``: figures here, words and marks there."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from urllib.parse import quote

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import tone_of, word_of
from wellfed.explain.pages.html_page import fill_in
from wellfed.explain.report.figures import Figure, figures_of
from wellfed.explain.report.finding_pages import page_of_finding
from wellfed.explain.report.pictures.run_pictures import pictures
from wellfed.explain.report.run_lines import error_lines, gain_of, sections, simulated_line, state_lines
from wellfed.record.entries import RunRecord

_TILES = ("rate", "of_ceiling", "gpu", "cpu", "wait", "memory")
"""Figures to be read at a glance; the processor where there is no GPU."""


def to_html(evidence: Evidence, folder: Path) -> str:
    """Returns the page of the run in ``folder``, texts escaped."""
    record = evidence.record
    found = {section.name: section for section in sections(record, evidence.first_metrics)}
    names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    error, state, simulated = error_lines(record), state_lines(record), simulated_line(record)
    return fill_in(
        Path(__file__).with_name("run_page.html.j2"),
        {
            "record": record,
            "sections": found,
            "pictures": pictures(evidence, folder),
            "error": error,
            "state": state,
            "simulated": simulated,
            "tiles": tiles(record),
            "rest": [line for line in found["verdict"].lines[1:] if line not in (*error, *state, simulated)],
            "gain_of": gain_of,
            "page_of": partial(page_of_finding, folder=folder),
            "tone_of": tone_of,
            "word_of": word_of,
            "files": [(name, quote(os.fsencode(name))) for name in names],
        },
    )


def tiles(record: RunRecord) -> list[Figure]:
    """Returns rate, share of the ceiling, utilisation, waiting and memory, if known."""
    found = figures_of(record)
    return [found[key] for key in _TILES if key in found and not (key == "cpu" and "gpu" in found)]
