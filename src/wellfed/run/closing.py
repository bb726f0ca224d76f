"""Diagnoses a run at its end, writes its reports, and hands page and pictures to the loggers."""

from __future__ import annotations

import logging
from typing import Any

from wellfed.errors import first_line
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_rules import conclude
from wellfed.explain.report.write import MARKDOWN, PAGE, write_reports
from wellfed.observe.loggers.journal import Journal
from wellfed.observe.loggers.sink import PICTURES
from wellfed.observe.timing.step_clock import PHASE_COLUMNS
from wellfed.record.entries import RunRecord
from wellfed.run.folder.resume import CHECKPOINTS
from wellfed.train.loop.checkpoint_files import BEST, LAST

_LOG = logging.getLogger(__name__)
PROFILE = "profile/trace.json"
_ARTIFACTS = {
    "report": MARKDOWN,
    "page": PAGE,
    "steps": "steps.csv",
    "metrics": "metrics.csv",
    "telemetry": "telemetry.csv",
    "log": "train.log",
    "last": f"{CHECKPOINTS}/{LAST}",
    "best": f"{CHECKPOINTS}/{BEST}",
    "profile": PROFILE,
}


def diagnosed(journal: Journal, *, has_page: bool) -> Evidence:
    """Returns the evidence of a finished run, with its findings, which the record and the reports then have, too.

    Args:
        has_page: whether report.html is drawn.
    """
    record, folder = journal.record, journal.folder
    evidence = Evidence(record)
    try:
        evidence = Evidence.of(record, folder)
        conclude(evidence)
        record.swing, record.findings = evidence.record.swing, evidence.record.findings
    except Exception:  # noqa: BLE001  the training must not be lost to a faulty report
        _LOG.exception("The run could not be diagnosed; the record has the figures.")
    journal.save(duration_s=record.duration_s)  # a kill while the page is drawn loses no finding
    try:
        write_reports(evidence, folder, has_page=has_page)
    except OSError as error:
        journal.disk_full(error, record.steps)
    except Exception as error:  # noqa: BLE001  as above
        _LOG.warning("%s could not be drawn: %s. %s has the text.", PAGE, first_line(error), MARKDOWN)
        journal.event("page_failed", message=first_line(error))
        _LOG.info("drawing it", exc_info=True)
    return evidence


def publish(journal: Journal) -> None:
    """Records the files of a finished run, and hands findings, page and pictures to its loggers."""
    record, folder, sink = journal.record, journal.folder, journal.sink
    record.artifacts.update({name: path for name, path in _ARTIFACTS.items() if (folder / path).exists()})
    rows = [
        [one["id"], one["severity"], f"{one['message']} {one['advice']}".rstrip(), " ".join(one["change"])]
        for one in record.findings
    ]
    sink.table("findings", ("id", "severity", "message", "change"), rows)
    if (folder / PAGE).exists():
        sink.file("report", folder / PAGE)
    for name, file in record.artifacts.items():
        path = folder / file
        if name not in _ARTIFACTS and path.suffix.lower() in PICTURES:
            sink.file(name, path)


def figures_of_run(record: RunRecord) -> dict[str, float]:
    """Returns figures of the whole run for a logger's summary, without those not measured.

    The milliseconds of the phases are left out: their names are those of curves, which have the latest steps.
    """
    throughput, ceiling = record.throughput, record.ceiling
    rate, top = throughput and throughput["samples_per_s"], ceiling and ceiling["samples_per_s"]
    found: dict[str, Any] = {
        "throughput/samples_per_s": rate,
        "throughput/readiness_frac": record.readiness_frac,
        "ceiling/samples_per_s": top,
        "ceiling/headroom": max(0.0, top / rate - 1) if rate and top else None,
        "memory/peak_gib": record.memory.get("measured_peak_gib"),
        **{f"step/{name}": share for name, share in (record.time or {}).items() if name not in PHASE_COLUMNS},
    }
    return {name: float(value) for name, value in found.items() if value is not None}
