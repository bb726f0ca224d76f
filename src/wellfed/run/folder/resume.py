"""Finds the run that ``resume=`` or ``rerun=`` names, and puts its recorded overrides before the command line."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from wellfed.config.compose import Composed, compose
from wellfed.config.quoting import assigned, is_null, key_value, quoted, unquoted
from wellfed.config.schema import PathsConfig, RunConfig
from wellfed.errors import ConfigError, Fault
from wellfed.masking import SECRET_SHOWN
from wellfed.ranks import launched
from wellfed.record import folder_lookup
from wellfed.record.entries import FILE_NAME, RunRecord, differences
from wellfed.record.files import plain
from wellfed.run.folder.checkpoint_file import WAY_OUT, is_readable, load_checkpoint, run_folder_of

CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Target:
    """Checkpoint from which a run resumes."""

    checkpoint: Path
    in_place: bool
    """Whether it resumes in its own folder (a run folder was named), or in a new one (a checkpoint was)."""
    earlier: RunRecord | None
    """Record of the run that wrote the checkpoint."""
    damaged: tuple[Path, ...] = ()
    """Newer checkpoints that can't be read."""

    @property
    def folder(self) -> Path:
        """Folder of the run that wrote the checkpoint; the file itself if it lies in none."""
        return self.checkpoint if self.earlier is None else run_folder_of(self.checkpoint)


def expand(overrides: Sequence[str], compose: Callable[[Sequence[str]], Composed[Any]] = compose) -> list[str]:
    """Returns the command line, after the recorded flags and overrides of the run that ``resume`` or ``rerun`` names.

    Later overrides win. Paths with characters of Hydra's grammar are quoted.

    Args:
        compose: composes a command line, to get the workload whose latest run is wanted.

    Raises:
        ConfigError: there is no such run, or overrides in its record must be typed again.
    """
    typed = [quoted(text) for text in overrides]
    given = {key: unquoted(value) for key, value in map(key_value, typed)}
    asked = {knob: str(given[knob]) for knob in ("resume", "rerun") if not is_null(given.get(knob))}
    if len(asked) != 1:  # the rules refuse both together, with the other faults
        return typed
    (knob, name), *_ = asked.items()
    rest = [text for text in typed if key_value(text)[0] != knob]
    path = (
        find_latest(compose(rest).config) if knob == "resume" and name == "auto" else _path(knob, name, rest, compose)
    )
    if path is None:
        return rest
    is_folder, earlier = _named_run(path, f"{knob}={path}")  # the run itself checks whether it may resume
    if knob == "rerun" and earlier is None:
        raise ConfigError.of(f"rerun={path}", "is no run folder.", "Name one with a run.json.")
    before = [] if earlier is None else [*earlier.flags, *earlier.overrides]
    if knob == "rerun":  # a trial of a sweep is replayed as the run that it was measured for
        before = [text for text in before if not text.startswith("sweep")]
    elif earlier is not None:
        before += derived_overrides(earlier)
    folder = [assigned("hydra.run.dir", str(path))] if is_folder and knob == "resume" else []
    return [*_kept(before, rest), *rest, *folder, assigned(knob, str(path))]


def _path(knob: str, asked: str, typed: Sequence[str], compose: Callable[[Sequence[str]], Composed[Any]]) -> Path:
    """Returns the typed path, or else the run of that name, with that beginning, or the ``last``.

    Raises:
        ConfigError: there is no run of that name.
    """
    path = Path(asked)
    if len(path.parts) != 1 or path.suffix or path.exists():
        return path
    try:
        log_dir = compose([text for text in typed if key_value(text)[0] != knob]).config.paths.log_dir
    except ConfigError:  # overrides that need those of the earlier run
        log_dir = PathsConfig.log_dir
    try:
        return folder_lookup.find(asked, Path(log_dir), folder_lookup.RUN, flag="paths.log_dir=<folder>")
    except ConfigError as error:
        raise ConfigError.of(f"{knob}={asked}", error.faults[0].problem, error.faults[0].way_out) from error


def locate(path: Path) -> Target:
    """Returns where ``resume=<path>`` continues. The path is a run folder or a checkpoint file.

    Raises:
        ConfigError: the path is neither, or the run is still running, or has no readable checkpoint.
    """
    where = f"resume={path}"
    in_place, earlier = _named_run(path, where)
    if not in_place or earlier is None:
        if not is_readable(path):
            raise ConfigError.of(where, "is not a checkpoint that can be read.", WAY_OUT)
        return Target(path, False, earlier)
    if (writer := _writer(earlier)) is not None:
        way_out = "Wait, or stop it. If it was killed there, name one of its checkpoints, to go on in a new folder."
        raise ConfigError.of(where, f"is still running ({writer}).", way_out)
    checkpoints = checkpoints_of(path)
    if (checkpoint := latest_checkpoint(path)) is None:
        raise ConfigError.of(where, "has no checkpoint that can be read.", f"Start it again: rerun={path}")
    return Target(checkpoint, True, earlier, tuple(checkpoints[: checkpoints.index(checkpoint)]))


def _named_run(path: Path, where: str) -> tuple[bool, RunRecord | None]:
    """Returns whether the path is a run's folder, and the run's record; no record for a checkpoint that lies alone."""
    if path.is_file():
        folder = run_folder_of(path)
        return False, _read(folder, where) if (folder / FILE_NAME).exists() else None
    if not path.is_dir():
        raise ConfigError.of(where, "there is no such file or folder.", "Name a run folder, a checkpoint, or auto.")
    return True, _read(path, where)


def checkpoints_of(folder: Path) -> list[Path]:
    """Returns every ``last*.ckpt`` of a run folder, the newest first, then ``best.ckpt``; damaged ones too."""

    def age(checkpoint: Path) -> int:  # last-10.ckpt is older than last-2.ckpt
        number = checkpoint.stem.removeprefix("last-")
        return int(number) if number.isdecimal() else sys.maxsize

    own = folder / CHECKPOINTS
    checkpoints = [own / "last.ckpt", *sorted(own.glob("last-*.ckpt"), key=age), own / "best.ckpt"]
    return [each for each in checkpoints if each.is_file()]


def latest_checkpoint(folder: Path) -> Path | None:
    """Returns the newest intact checkpoint of a run folder; ``best.ckpt`` only if no other is intact."""
    return next(filter(is_readable, checkpoints_of(folder)), None)


def saved_step(folder: Path, *, trusted: bool = False) -> tuple[str | None, int]:
    """Returns name and step of the checkpoint from which ``resume=<folder>`` continues; (None, 0) without any."""
    for checkpoint in checkpoints_of(folder):
        with suppress(ConfigError):
            return checkpoint.name, int(load_checkpoint(checkpoint, trusted=trusted)["global_step"])
    return None, 0


def find_latest(config: RunConfig) -> Path | None:
    """Returns the newest unsuccessful run of the workload that can be resumed. Prints why newer ones can't be.

    Raises:
        ConfigError: the record of a newer run can't be read.
    """
    runs = Path(config.paths.log_dir) / config.workload.name / "runs"
    passed_over, found = [], None
    for folder in sorted(sorted(runs.glob("*")), key=folder_lookup.RUN.time, reverse=True):
        if not folder_lookup.RUN.is_in(folder) or _read(folder, f"resume=auto: {folder}").status == "ok":
            continue
        try:
            found = locate(folder).folder
            break
        except ConfigError as error:
            passed_over.append(f"{folder} {error.faults[0].problem.rstrip('.')}")
    if found is None and not passed_over:
        passed_over.append("no earlier run of this workload to go on from")
    if passed_over:
        next_step = f"going on with {found}" if found else "starting afresh"
        print(f"resume=auto: {'; '.join(passed_over)}; {next_step}.", file=sys.stderr)
    return found


def _writer(earlier: RunRecord) -> str | None:
    """Returns the process that still writes to a run folder, as text; None if none does. One on another host may be
    dead. It is, if this is its requeued attempt.
    """
    launch, before = launched(), earlier.launch
    is_next = (
        launch is not None
        and before is not None
        and earlier.host_name != socket.gethostname()
        and launch.job is not None
        and launch.job == before["job"]
        and launch.attempt > before["attempt"]
    )
    is_over = earlier.status != "running" or is_next
    return None if is_over else f"process {earlier.pid} on {earlier.host_name}"


_NOT_EVALUATED = tuple(
    f"workload.{name}"
    for name in ("optimizer", "schedule", "effective_batch_size", "eval_batch_size", "drop_last", "sample_unit")
)
"""Values that test figures don't depend on."""


_TRAIN_ENCODER = "workload.model.train_encoder"
"""Knob that a resume may set to true: the encoder of the features is trained from there on."""
_FOREACH = "workload.optimizer.foreach"
"""Knob that a restart sets to false after out of memory: one weight at a time, with the same result."""


def check_unchanged(composed: Composed[RunConfig], earlier: RunRecord, *, evaluates: bool = False) -> list[str]:
    """Checks that the run learns the same as the one that wrote the checkpoint, or evaluates the same.

    Returns:
        A line for each file or folder that lies elsewhere now. It is taken for the same if its own name is.

    Raises:
        ConfigError: it has another ``workload.*`` or ``seed``; both values of each are listed.
    """
    now, then = plain(composed.resolved), earlier.filled_config()  # the record writes inf as null
    then, now = ({key: each.get(key) for key in ("seed", "workload")} for each in (then, now))
    faults, moved = [], []
    for name, *values in differences(then, now):
        if composed.follows(name, "workload."):  # what it follows is compared itself
            continue
        if evaluates and name.startswith(_NOT_EVALUATED):
            continue
        if not evaluates and (name == _FOREACH or (name == _TRAIN_ENCODER and values == [False, True])):
            continue
        is_of_machine = evaluates and composed.follows(name, "trainer.", "gpu.", "paths.", "oc.env:")
        if _is_moved(*values) or is_of_machine:
            moved.append(f"{name} is {values[1]} now and was {values[0]}: taken for the same.")
            continue
        old, new = ("null" if value is None else value for value in values)
        way_out = f"Leave it at {old}, or start a new run without resume."
        if evaluates:
            way_out = "Set it back in configs/, or check out the git commit that run.json names."
        elif old == SECRET_SHOWN:
            way_out = "Type it again (secrets are not written down)."
        run = "of the checkpoint" if evaluates else "to resume"
        faults.append(Fault(name, f"is {new} now and was {old} in the run {run}.", way_out))
    if faults:
        raise ConfigError(faults)
    return moved


def _is_moved(old: Any, new: Any) -> bool:
    """Returns whether both are paths of one name in different folders."""
    if not (isinstance(old, str) and isinstance(new, str)):
        return False
    paths = PurePath(old), PurePath(new)
    return paths[0].name == paths[1].name and any(len(path.parts) > 1 for path in paths)


def derived_overrides(earlier: RunRecord) -> list[str]:
    """Returns overrides for values derived from the data of a run, since the data may have changed."""
    return [f"{knob}={json.dumps(value)}" for knob, value in earlier.derived().items()]


def _kept(earlier: Sequence[str], later: Sequence[str]) -> list[str]:
    """Returns the earlier overrides that no later one replaces.

    Overrides with secrets can't be replayed, since secrets are not recorded. They are left out and named.
    """
    replaced = {key_value(text)[0] for text in later} | {"resume", "rerun"}
    kept = [text for text in earlier if key_value(text)[0] not in replaced]
    left_out = [key_value(text)[0] for text in kept if SECRET_SHOWN in text]
    if left_out:
        print(f"Left out, since secrets are not written down: {', '.join(left_out)}. Type them again.", file=sys.stderr)
    return [quoted(text) for text in kept if SECRET_SHOWN not in text]


def _read(folder: Path, where: str) -> RunRecord:
    try:
        return RunRecord.read(folder)
    except OSError as error:
        problem = f"is no run folder: {error.strerror or error}."
        raise ConfigError.of(where, problem, "Name one with a run.json.") from error
    except ValueError as error:
        raise ConfigError.of(where, str(error), "Name another run, or move that file away.") from error
