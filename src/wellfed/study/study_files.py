"""Writes and reads ``sweep.json``, ``search.json`` and ``tune.json``: which study a folder holds.

`load` reads a whole folder of a sweep or a search: its file and its rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from wellfed import project
from wellfed.command_line import command
from wellfed.errors import ConfigError
from wellfed.record.files import plain, write_atomically
from wellfed.record.folder_lookup import FolderKind
from wellfed.record.provenance import engine_state, engine_version, git_state
from wellfed.study.objective import OBJECTIVES, SAMPLES_PER_S, Objective, of_metric
from wellfed.study.points import space as spaces
from wellfed.study.points.grid import NO_AXES, Grid, GridPoint, group_of, of_one_run
from wellfed.study.points.space import Axis
from wellfed.study.rows import Rows, read_rows
from wellfed.study.trial_end import TrialMetric
from wellfed.study.tune_gain import TurnsMeasured

SCHEMA = 2
SWEEP = FolderKind("sweep", "sweep.json", f"{command('train')} -m sweep=quick")
TUNE = FolderKind("tune", "tune.json", command("tune"))
SEARCH = FolderKind("search", "search.json", f"{command('train')} -m workload.optimizer.lr=0.01,0.001")


@dataclass(frozen=True, kw_only=True)
class StudyFile:
    """Facts that the trials of a study share."""

    folder_kind: ClassVar[FolderKind]

    name: str
    workload: str
    code: str
    """Version of the code: see `study_code`."""
    flags: tuple[str, ...] = ()
    """Arguments that set where configurations are searched: flags, and ``hydra.searchpath``."""

    def arguments(self, overrides: Iterable[str]) -> list[str]:
        """Returns the arguments of ``train.py`` that run a trial of ``overrides`` without the study."""
        return [*self.flags, *of_one_run(overrides)]

    def write(self, folder: Path) -> None:
        """Replaces the file as a whole."""
        write_atomically(folder / self.folder_kind.marker, json.dumps(self.to_dict(), indent=1) + "\n")

    def to_dict(self) -> dict[str, Any]:
        """Returns what is written."""
        found: dict[str, Any] = plain({"schema": SCHEMA, **asdict(self)})
        return found

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Returns the content of a folder's file.

        Raises:
            OSError: there is no such file.
            ValueError: it is not a file of this kind of study, or one of another version.
        """
        path = folder / cls.folder_kind.marker
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["schema"] != SCHEMA:
                raise ValueError("it was written by another version of wellfed")
            known = {each.name: found[each.name] for each in fields(cls) if each.name in found}
            lists = {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
            space = {"space": spaces.from_dict(known["space"])} if "space" in known else {}
            return cls(**{**known, **lists, **space})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not the file of a {cls.folder_kind.noun}: {error}.") from error


@dataclass(frozen=True, kw_only=True)
class PointsFile(StudyFile):
    """Facts that the trials of a sweep or a search share."""

    fixed: tuple[str, ...]
    """Overrides that all trials share, with secrets as ``***``."""
    space: Mapping[str, Axis]
    """Knob or group that varies -> its values."""
    ids: tuple[str, ...] = ()
    """Ids of the points of a grid, in its order; empty where a sampler picks the points."""
    trial_metric: ClassVar[TrialMetric | None] = None
    """Metric that ranks whole trainings; None = trials are timed."""

    @property
    def points(self) -> list[GridPoint]:
        """Points of the grid that was asked for last. Their overrides hide secrets, so ids can't be made of them."""
        grid = Grid(spaces.grid_values(self.space), self.fixed)
        return [replace(point, id=id_) for point, id_ in zip(grid.points(), self.ids, strict=True)]

    @property
    def axis_names(self) -> list[str]:
        """Knobs and groups that vary."""
        return list(self.space)

    @property
    def ranked_by(self) -> Objective:
        """Figure that ranks the points."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class SweepFile(PointsFile):
    """``sweep.json``: facts that a sweep's timed trials share."""

    folder_kind = SWEEP

    sample_unit: str
    trial_steps: int = 0
    """Most steps measured; 0 = unknown."""
    objective: str = SAMPLES_PER_S.name
    """Name in `OBJECTIVES` of the figure that ranks."""

    @property
    def ranked_by(self) -> Objective:
        """Figure that ranks the points."""
        return OBJECTIVES[self.objective]


@dataclass(frozen=True, kw_only=True)
class SearchFile(PointsFile):
    """``search.json``: facts that a search's whole trainings share."""

    folder_kind = SEARCH

    metric: str
    """Metric of validation that ranks, without ``val/``."""
    mode: Literal["max", "min"]
    sampler: str
    pruner: str
    max_trials: int

    @property
    def trial_metric(self) -> TrialMetric:  # type: ignore[override]  # read only
        """Metric that ranks whole trainings."""
        return TrialMetric(self.metric, self.mode)

    @property
    def ranked_by(self) -> Objective:
        """Figure that ranks the points."""
        return of_metric(self.metric, higher_is_better=self.mode == "max")

    @property
    def identity(self) -> dict[str, str]:
        """Facts of which another value makes another search.

        Overrides about watching trials or where they write don't count. A grid may get other values of its axes.
        """
        shared = sorted(text for text in self.fixed if group_of(text) not in NO_AXES)
        axes = dict(sorted(self.space.items()))
        return {
            "metric": f"val/{self.metric} ({self.mode})",
            "overrides": " ".join(shared),
            **({"axes": " ".join(axes)} if self.sampler == "grid" else {"space": spaces.describe(axes)}),
        }


@dataclass(frozen=True, kw_only=True)
class TuneFile(StudyFile):
    """``tune.json``: what a tune was asked, and what it has found so far."""

    folder_kind = TUNE

    sample_unit: str
    start: tuple[str, ...]
    """Overrides as typed, with secrets as ``***``."""
    machine: str
    """Processor and GPUs."""
    trial_steps: int
    status: Literal["running", "done", "stopped"] = "running"
    """``running`` without a process: it was killed, and the same command goes on."""
    ended_because: str | None = None
    steps: Sequence[Mapping[str, Any]] = ()
    """Steps in order, the start first."""
    trial_seconds: float = 0.0
    """Duration of these trials together."""
    noise: str = ""
    """A sentence on the noise between runs."""
    result: tuple[str, ...] = ()
    """Overrides behind those of the start; empty for the start itself."""
    comparison: TurnsMeasured | None = None
    """None where the start is the result, or the tune has not come to it."""
    advice: Sequence[Mapping[str, Any]] = ()
    written: str | None = None
    """File of the experiment."""
    why_not: str | None = None
    """Why there is no file."""
    use: tuple[str, ...] = ()
    """Overrides of the recommended command."""
    unproven: tuple[str, ...] = ()
    """Overrides that run the result, where its gain is within noise and the start is recommended."""

    def differs_from_earlier(self, folder: Path) -> list[str]:
        """Returns what differs from an earlier tune in the folder; empty where its figures can be used."""
        try:
            earlier = TuneFile.read(folder)
        except (OSError, ValueError):
            return ["what it was asked can't be read"]
        named = {"code": "the version of the code", "machine": "the machine", "trial_steps": "sweep.trial_steps"}
        return [
            f"{words} ({getattr(earlier, name)} -> {getattr(self, name)})"
            for name, words in named.items()
            if getattr(earlier, name) != getattr(self, name)
        ]


def study_code() -> str:
    """Returns the project's commit with a digest of uncommitted changes, the engine, and a digest of Python files.

    The engine's version is left out where it is part of the project's checkout. The last digest covers files that git
    does not track.
    """
    git, engine = git_state(project.root()), engine_state()
    named = []
    if git is not None:
        named.append(f"{git['commit'][:10]}{'+' if git['digest'] else ''}{git['digest'][:6]}")
    if git is None or not engine["within_project"]:
        named.append(engine_version(engine))
    return f"{', '.join(named)}, sources {project.source_digest()[:6]}"


def is_of_search(folder: Path) -> bool:
    """Returns whether a folder is a search's."""
    return (folder / SEARCH.marker).exists()


def load(folder: Path) -> tuple[SweepFile | SearchFile, Rows]:
    """Returns what a folder of a sweep or a search holds.

    Raises:
        ConfigError: its files can't be read, or are not those of a study.
    """
    kind = SearchFile if is_of_search(folder) else SweepFile
    try:
        file = kind.read(folder)
        return file, read_rows(folder, file.trial_metric, file.code)
    except (OSError, ValueError) as error:
        way_out = f"Start it again with another {kind.folder_kind.noun}.name."
        raise ConfigError.of(str(folder), f"can't be read: {error}", way_out) from error
