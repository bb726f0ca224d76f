"""Names what a machine of a cluster is told before and with each trial of a sweep or a search."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from wellfed import project
from wellfed.study.clusters.keeper import ProcessSettings
from wellfed.study.search.search_file import SearchFile
from wellfed.study.sweep.ledger import Row
from wellfed.study.trials.tasks import RunPoint


@dataclass(frozen=True)
class Greeting:
    """What a machine must have, or be told, before it can run trials of a sweep."""

    sweep: str
    """Its folder, absolute."""
    alive: str
    """A file in it that is there as long as the sweep is: a job that has outlived its sweep ends itself."""
    project: str
    """Its folder, absolute."""
    source: str
    """Digest of the code."""
    code: str
    """Its version in words, for messages."""
    timeout_s: float
    """Of a trial; infinite = none."""
    prepare_s: float
    """That data and model may take."""
    group: str
    """``sweep`` or ``search``: has the knobs that advice names."""
    argv: tuple[str, ...]
    """The command line of the sweep: Lightning starts the other ranks of a trial by it."""


@dataclass(frozen=True)
class TrialOrder:
    """One trial."""

    point: RunPoint
    row: Row
    """What is known before it starts."""
    search: SearchFile | None = None
    """It is a whole training, ranked as this says; None = a trial that is timed."""


def process_settings(greeting: Greeting) -> ProcessSettings:
    """What a keeper starts: this file, with the code of this very checkout where the machine sees it."""
    searched = [str(Path(folder).absolute()) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    return ProcessSettings(
        arguments=("-c", "from wellfed.study.trials.node import main; main()"),
        folder=str(Path.cwd()),
        python_path=(*map(str, project.import_paths()), *searched),
        greeting=json.dumps(asdict(greeting)).encode(),
    )
