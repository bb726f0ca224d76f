"""Collects the pictures of a report by section: drawn from tables, or PNG files of the workload's evaluation."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.pages.chart import PagePicture
from wellfed.explain.report.pictures.life_picture import life
from wellfed.explain.report.pictures.machine_pictures import card, cpus, ranks_side_by_side, side_by_side
from wellfed.explain.report.pictures.memory_picture import memory
from wellfed.explain.report.pictures.metric_pictures import metrics
from wellfed.explain.report.pictures.step_time_picture import histogram, step_time
from wellfed.explain.report.pictures.time_axis import TimeAxis
from wellfed.explain.report.pictures.timeline_picture import timeline
from wellfed.explain.report.pictures.utilisation_picture import utilisation
from wellfed.explain.report.run_sections import own_files
from wellfed.observe.telemetry.machines import HOST
from wellfed.record import RunRecord
from wellfed.units import MIB

MOST_PICTURES, MOST_BYTES = 8, MIB
"""Most pictures in a page, and bytes of each; others are named only."""
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def pictures(evidence: Evidence, folder: Path) -> Mapping[str, Any]:
    """Returns the pictures of a run by their section, and ``axis``, the time axis of the linked ones.

    Pictures of ``beside_`` a section stand with its lines, those of ``small_`` beside each other.
    """
    axis = TimeAxis.of(evidence)
    host = [] if evidence.watched.keys() <= {HOST} else list(cpus(evidence, axis))
    return {
        "axis": axis,
        "life": list(life(evidence)),
        "utilisation": [*utilisation(evidence, axis), *host],
        "beside_utilisation": list(side_by_side(evidence)),
        "time": [*step_time(evidence, axis), *timeline(evidence), *ranks_side_by_side(evidence)],
        "beside_time": list(histogram(evidence)),
        "memory": list(memory(evidence, axis)),
        "small_memory": list(card(evidence, axis)),
        "metrics": list(metrics(evidence, axis)),
        "files": list(own_pictures(evidence.record, folder)),
    }


def own_pictures(record: RunRecord, folder: Path) -> Iterator[PagePicture]:
    """Yields the first PNG files of the evaluation, unchanged; a missing file or another format is left out."""
    found = 0
    for name, path in own_files(record).items():
        content = _content(folder, path) if found < MOST_PICTURES and path.lower().endswith(".png") else None
        if content is not None:
            found += 1
            source = base64.b64encode(content).decode()
            yield PagePicture(name, image=Markup('<img alt="{}" src="data:image/png;base64,{}">').format(name, source))


def _content(folder: Path, path: str) -> bytes | None:
    try:
        file = (folder / path).resolve()
        if not file.is_relative_to(folder.resolve()) or file.stat().st_size > MOST_BYTES:
            return None
        content = file.read_bytes()
    except OSError:
        return None
    return content if content.startswith(_SIGNATURE) else None
