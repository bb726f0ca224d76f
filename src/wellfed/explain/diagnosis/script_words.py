"""Turns the overrides of a finding into code for the author of a watched script: ``DataLoader(num_workers=4)``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from wellfed.explain.diagnosis.finding import Finding
from wellfed.explain.diagnosis.words import code_for, rendered, template
from wellfed.record.entries import RunRecord

HANDOVER_MS = 2.0
"""Approximate milliseconds to receive a batch from a worker process of a DataLoader."""
SPLIT = "split the stream by get_worker_info(), else each worker repeats all samples"
"""Change that more than one worker of an IterableDataset needs. Without it training has other data."""
OWN_STREAM = "Batches are copied on a stream of their own: that copy is not told apart."
"""Message of the event `unseen` of a script that copies ahead of its steps."""
OTHER_THREAD = (
    "Batches are read in another thread than the one that trains. The wait for them counts as time between steps."
)
NO_LOADER = "No DataLoader was iterated: making batches counts as time between steps, or as part of them."
"""Messages of the event `unseen` of a script whose waiting for data was not seen."""
NO_STEP = (
    "No step was seen: no optimizer of torch stepped in the watched thread, or no batch came through "
    "watch.batches(loader)."
)
"""Message of the event `unseen` of a script of which nothing can be timed, however long it runs."""
OF_LOADER = ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory")
"""Knobs that DataLoader has under the same name."""
_LITERALS = {"true": "True", "false": "False", "null": "None"}


def is_script(record: RunRecord) -> bool:
    """Returns whether the record is a watched script's."""
    return "script" in record.config


def in_script_words(finding: Finding, record: RunRecord) -> Finding:
    """Returns the finding with code instead of overrides. Workers are not advised where handing over costs as much."""
    message, advice = finding.for_script or (finding.message, finding.advice)
    build_ms = finding.evidence.get("build_ms", HANDOVER_MS)
    if finding.id == "loading_in_main_process" and isinstance(build_ms, float) and build_ms < HANDOVER_MS:
        advice = rendered(template(finding.id, "quick"), {"handover_ms": HANDOVER_MS})
        lost_frac = finding.time_lost_frac
        return replace(finding, message=message, advice=advice, change=(), gain=None, lost_frac=lost_frac)
    change = tuple(dict.fromkeys(_changes(finding.change, record)))
    return replace(finding, message=message, advice=advice, change=change)


def _changes(overrides: Sequence[str], record: RunRecord) -> Iterator[str]:
    """Yields code for overrides. All settings of the DataLoader are one change."""
    values = dict(override.lstrip("+").split("=", 1) for override in overrides if "=" in override)
    loader = {name: values[key] for name in OF_LOADER if (key := f"loader.{name}") in values}
    before = record.config.get("loader", {})
    if loader.get("num_workers", "0") not in ("0", "null") and not before.get("persistent_workers"):
        loader.setdefault("persistent_workers", "true")
    if loader:
        yield f"DataLoader({', '.join(f'{name}={_LITERALS.get(value, value)}' for name, value in loader.items())})"
    if before.get("is_iterable") and loader.get("num_workers", "0") not in ("0", "1", "null"):
        yield SPLIT
    yield from (code for knob, value in values.items() if value != "null" and (code := code_for(knob, value)))
