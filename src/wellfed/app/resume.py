"""``resume=`` and ``rerun=``: what an earlier run's record adds to the command line, before anything is composed."""

from __future__ import annotations

import re
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wellfed import record
from wellfed.config.compose import Composed, compose
from wellfed.config.schema import RunConfig
from wellfed.errors import ConfigError, Fault

_PATH_KEYS = (
    "resume",
    "rerun",
    "checkpoint",
    "workload.data.path",
    "paths.log_dir",
    "paths.cache_dir",
    "hydra.run.dir",
)
_PLAIN = re.compile(r"^[\w./~@%-]*$")
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Target:
    """Where a resumed run goes on."""

    checkpoint: Path
    in_place: bool
    """In its own folder (a run folder was named), or in a new one (a checkpoint was)."""
    earlier: Mapping[str, Any] | None
    """The record of the run that wrote the checkpoint."""


def expand(overrides: Sequence[str]) -> list[str]:
    """The command line with the recorded overrides of the run that ``resume`` or ``rerun`` names put before it.

    Later overrides win. Paths with characters that Hydra's grammar would read are quoted.

    Raises:
        ConfigError: there is no such run, it is still running, or it has nothing to go on from.
    """
    typed = [quoted(text) for text in overrides]
    given = {key: _unquoted(value) for key, value in (_key_value(text) for text in typed)}
    resume, rerun = given.get("resume"), given.get("rerun")
    if _is_null(resume) and _is_null(rerun):
        return typed
    if not _is_null(resume) and not _is_null(rerun):
        return typed  # the rules refuse both together, with the other faults
    if not _is_null(rerun):
        assert rerun is not None
        earlier = _read(Path(rerun), f"rerun={rerun}")
        return _merged(earlier["overrides"], typed)
    assert resume is not None
    rest = [text for text in typed if _key_value(text)[0] != "resume"]
    if resume == "auto":
        found = find_latest(rest)
        if found is None:
            print("resume=auto: no earlier run of this workload to go on from; starting afresh.", file=sys.stderr)
            return rest
        resume = str(found)
    target = locate(Path(resume), may_run=True)  # the run itself refuses one that is running
    before = list(target.earlier["overrides"]) if target.earlier else []
    merged = _merged(before, rest)
    folder = [quoted(f"hydra.run.dir={Path(resume)}")] if target.in_place else []
    return [*merged, *folder, quoted(f"resume={resume}")]


def locate(path: Path, *, may_run: bool = False) -> Target:
    """What ``resume=<path>`` means: a run folder, or a checkpoint file.

    Args:
        may_run: don't mind that the run is running: this is another rank of it.

    Raises:
        ConfigError: neither, or the run is still running, or no checkpoint of it can be read.
    """
    where = f"resume={path}"
    if path.is_file():
        if not is_readable(path):
            raise ConfigError([Fault(where, "is not a checkpoint that can be read.", "Name another, or a run folder.")])
        folder = path.parent.parent
        return Target(path, False, _read(folder, where) if (folder / record.FILE_NAME).exists() else None)
    if not path.is_dir():
        raise ConfigError(
            [Fault(where, "there is no such file or folder.", "Name a run folder, a checkpoint, or auto.")]
        )
    earlier = _read(path, where)
    if earlier["status"] == "running" and not may_run:
        raise ConfigError(
            [
                Fault(
                    where,
                    f"is still running (process {earlier['pid']} on {earlier['host_name']}).",
                    "Wait, or stop it.",
                )
            ]
        )
    checkpoint = latest_checkpoint(path)
    if checkpoint is None:
        raise ConfigError([Fault(where, "has no checkpoint that can be read.", f"Start it again: rerun={path}")])
    return Target(checkpoint, True, earlier)


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest ``last*.ckpt`` of a run folder that is whole."""
    places = [folder / CHECKPOINTS / "last.ckpt", *sorted((folder / CHECKPOINTS).glob("last-*.ckpt"))]
    return next((place for place in places if place.is_file() and is_readable(place)), None)


def is_readable(checkpoint: Path) -> bool:
    """Whether the archive is whole; its end is written last. Reads no tensor and needs no torch."""
    try:
        with zipfile.ZipFile(checkpoint) as archive:
            return any(name.endswith("data.pkl") for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def find_latest(overrides: Sequence[str]) -> Path | None:
    """The newest run of the workload that these overrides mean which did not end well and has a checkpoint."""
    config: RunConfig = compose(overrides).config
    runs = Path(config.paths.log_dir) / config.workload.name / "runs"
    for folder in sorted(runs.glob("*"), reverse=True):
        try:
            earlier = record.read(folder)
        except (OSError, ValueError):
            continue
        if earlier["status"] not in ("ok", "running") and latest_checkpoint(folder) is not None:
            return folder
    return None


def check_unchanged(composed: Composed[RunConfig], earlier: Mapping[str, Any]) -> None:
    """What is learned must be what the checkpoint learned.

    Raises:
        ConfigError: another ``workload.*`` or ``seed``; lists both values of each.
    """
    now, then = composed.resolved, earlier["config"]
    faults = [
        Fault(
            name,
            f"is {_show(new)} now and was {_show(old)} in the run to resume.",
            f"Leave it at {_show(old)}, or start a new run without resume.",
        )
        for name, old, new in differences(
            {"seed": then.get("seed"), "workload": then.get("workload")},
            {"seed": now.get("seed"), "workload": now.get("workload")},
        )
    ]
    if faults:
        raise ConfigError(faults)


def differences(old: Any, new: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    """``(dotted name, old, new)`` of every leaf in which two trees differ."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        found = []
        for key in [*old, *(key for key in new if key not in old)]:
            found += differences(old.get(key), new.get(key), f"{name}.{key}" if name else str(key))
        return found
    return [] if old == new else [(name, old, new)]


def quoted(text: str) -> str:
    """An override whose value is a path, quoted where Hydra's grammar would stumble over it."""
    key, value = _key_value(text)
    if key not in _PATH_KEYS or value is None or _PLAIN.match(value) or value[:1] in "'\"" or value.startswith("$"):
        return text
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"{text[: text.index('=')]}='{escaped}'"


def _merged(earlier: Sequence[str], later: Sequence[str]) -> list[str]:
    """Earlier overrides that no later one replaces, then the later ones."""
    replaced = {_key_value(text)[0] for text in later} | {"resume", "rerun"}
    return [quoted(text) for text in earlier if _key_value(text)[0] not in replaced] + list(later)


def _read(folder: Path, where: str) -> dict[str, Any]:
    try:
        return record.read(folder)
    except OSError as error:
        raise ConfigError(
            [Fault(where, f"is no run folder: {error.strerror or error}.", "Name one with a run.json.")]
        ) from error
    except ValueError as error:
        raise ConfigError([Fault(where, str(error), "Name another run.")]) from error


def _key_value(text: str) -> tuple[str, str | None]:
    key, separator, value = text.partition("=")
    return key.lstrip("+~").split("@")[0], value if separator else None


def _unquoted(value: str | None) -> str | None:
    if value and len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
        return value[1:-1].replace(f"\\{value[0]}", value[0]).replace("\\\\", "\\")
    return value


def _is_null(value: str | None) -> bool:
    return value is None or value.lower() in ("", "null")


def _show(value: Any) -> str:
    return "null" if value is None else str(value)
