"""Draws what a run has left in its tables, for the sections of its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.pages.picture import no_pictures
from wellfed.explain.report.pictures.memory_picture import memory
from wellfed.explain.report.pictures.metric_pictures import metrics
from wellfed.explain.report.pictures.own_pictures import own_pictures
from wellfed.explain.report.pictures.picture_parts import PagePicture
from wellfed.explain.report.pictures.step_time_picture import step_time
from wellfed.explain.report.pictures.time_axis import TimeAxis
from wellfed.explain.report.pictures.utilisation_picture import utilisation
from wellfed.explain.report.run_sections import Name


def pictures(evidence: Evidence, folder: Path) -> Mapping[Name, Sequence[PagePicture]]:
    """Returns the pictures of a run by their section."""
    own = list(own_pictures(evidence.record, folder))
    if no_pictures():
        return {"files": own}
    axis = TimeAxis.of(evidence)
    return {
        "utilisation": list(utilisation(evidence, axis)),
        "time": list(step_time(evidence, axis)),
        "memory": list(memory(evidence, axis)),
        "metrics": list(metrics(evidence)),
        "files": own,
    }
