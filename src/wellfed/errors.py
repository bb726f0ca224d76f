"""Defines the errors that a user can cause or meet, each with its exit code.

A message has three parts: the value in hand, the rule it breaks, and a way out to type. Entry points print the message
alone; HYDRA_FULL_ERROR=1 adds the traceback.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from wellfed.masking import SECRET_SHOWN, hidden, masked_override

ErrorKind = Literal["config", "data", "device_oom", "host_oom", "worker", "disk", "code"]

LESS_HOST_MEMORY = "fewer loader.num_workers, a smaller loader.prefetch_factor"
"""Advice if host memory or /dev/shm runs out; messages append more."""
KILLED_WORKER = (
    f"mostly for want of host memory or /dev/shm. Set {LESS_HOST_MEMORY}, or loader.backend=inline to see its error."
)
"""Cause and advice if a signal ended a worker process."""
ENDED_WORKER = (
    "the data, or a library that they call, ended the process (os._exit, exit). loader.backend=inline "
    "loader.num_workers=0 ends the run there, where a debugger sees it."
)
"""Cause and advice if a worker process ended with an exit code."""

EXIT_OK = 0
EXIT_FAILED = 1
"""The run failed after the first batch was requested."""
EXIT_NOTHING_RUN = 2
"""Configuration, plan, input or command line was wrong; no run folder is left."""
EXIT_OUT_OF_MEMORY = 3
"""Memory ran out and no fallback was left. Or training is predicted not to fit; then no run folder is left."""
EXIT_INTERRUPTED = 130
_OURS = Path(__file__).resolve().parent


_NEEDED = frozenset(
    {"hydra", "omegaconf", "yaml", "antlr4", "torch", "lightning", "torchmetrics", "numpy", "rich", "psutil", "pynvml"}
)
"""Packages without which no command runs; ``make install`` puts them into ``.venv``."""


@contextmanager
def in_environment() -> Iterator[None]:
    """Ends the process with one line if a package of `_NEEDED` can't be imported inside; other import errors pass."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _NEEDED or os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        way_out = "Activate the environment: source .venv/bin/activate."
        way_out = f"{way_out} make train makes .venv where there is none, and trains."
        print(f"The package {missing} is not installed for {sys.executable}. {way_out}", file=sys.stderr)
        sys.exit(EXIT_NOTHING_RUN)


class WellfedError(Exception):
    """Base of all errors whose message is written for the user."""

    kind: ErrorKind = "code"
    """`error.kind` of the run record."""
    exit_code: int | None = None
    """Exit code of the command; None = the kind decides."""


@dataclass(frozen=True)
class Fault:
    """One thing wrong with a configuration."""

    where: str
    """Dotted name of the knob, or the override as typed."""
    problem: str
    """The value in hand and the rule it breaks."""
    way_out: str
    """Something to type or to change."""

    def __str__(self) -> str:
        where, rest = masked_override(self.where), " ".join(filter(None, (self.problem, self.way_out)))
        key, _, value = self.where.partition("=")
        if where == f"{key}='{SECRET_SHOWN}'":  # the value may be quoted in the way out
            rest = rest.replace(value, SECRET_SHOWN)
        return f"{where}: {hidden(rest)}"


class ConfigError(WellfedError):
    """A configuration that can't be run, with all faults found."""

    kind = "config"

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = tuple(faults)
        count = "1 fault" if len(self.faults) == 1 else f"{len(self.faults)} faults"
        head = f"{count} in the configuration; nothing was run."
        super().__init__(self.under(head))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.faults,)  # pickle would hand the message to __init__

    def under(self, heading: str) -> str:
        """Returns the faults under another heading than "configuration"."""
        return "\n".join([heading, *(f"  - {fault}" for fault in self.faults)])

    @classmethod
    def of(cls, where: str, problem: str, way_out: str) -> ConfigError:
        """Returns an error with one fault."""
        return cls([Fault(where, problem, way_out)])

    @classmethod
    def check(cls, prefix: str, *rules: tuple[str, object, bool, str, str]) -> None:
        """Raises one error with a fault for each argument that breaks its rule.

        Args:
            prefix: dotted name of the node of the arguments, such as ``workload.model``.
            rules: name, value, whether it is fine, the problem, and what to write instead, both without full stops:
                ``("lr", lr, lr > 0, "is not above 0", "lr=0.01 or so")``.
        """
        faults = [
            Fault(f"{prefix}.{name}", f"{value!r} {problem}.", f"Write {way_out}.")
            for name, value, is_fine, problem, way_out in rules
            if not is_fine
        ]
        if faults:
            raise cls(faults)


class DoesNotFit(ConfigError):
    """A training that is predicted to need more memory than its budget.

    A plan or a sweep reports it as a fault. A run ends as if it had run out of memory.
    """

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__(faults)
        self.args = (self.under("Memory does not suffice; nothing was run."),)


class DataError(WellfedError):
    """Input that is missing, unreadable or malformed; names file, line and way out."""

    kind = "data"


class LastSaveFailed(WellfedError):
    """Raised if the final or the best weights could not be written."""

    kind = "disk"

    def __init__(self, step: int, path: Path, error: BaseException) -> None:
        super().__init__(f"The weights of step {step} could not be written to {path}: {first_line(error)}.")


class ModelError(WellfedError):
    """A mistake in a user's model, or in its use of a batch; the message names both."""


class NotShown(WellfedError):
    """Output that could not be written, for example because the disk is full."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"Nothing more can be shown: {error.strerror or error}.")


class OutOfMemoryExhausted(WellfedError):
    """Raised if memory ran out and no fallback was left; the message lists the attempts.

    Args:
        kind: the memory that ran out.
    """

    kind: Literal["device_oom", "host_oom"] = "device_oom"

    def __init__(self, message: str, kind: Literal["device_oom", "host_oom"] = "device_oom") -> None:
        super().__init__(message)
        self.kind = kind


class RestartNeeded(OutOfMemoryExhausted):
    """Raised if memory ran out where the step can't be repeated; the run can only continue from a checkpoint.

    `wellfed.run` restarts it. If that is impossible, the run ends as with `OutOfMemoryExhausted`.

    Args:
        changes: overrides that need less memory, knob -> value.
    """

    def __init__(
        self,
        message: str,
        changes: Mapping[str, object],
        kind: Literal["device_oom", "host_oom"] = "device_oom",
    ) -> None:
        super().__init__(message, kind)
        self.changes = dict(changes)


def text_of(error: object) -> str:
    """Returns ``str(error)`` with secrets masked, before a cut could split one; empty if ``str`` raises."""
    try:
        return hidden(str(error))
    except Exception:  # noqa: BLE001  whatever a user's exception does
        return ""


def first_line(error: object) -> str:
    """Returns the first line of an error or a warning; its type if it has no text."""
    return next(iter(text_of(error).strip().splitlines()), type(error).__name__)


def type_and_line(error: BaseException) -> str:
    """Returns the type of an error, and the first line of its text if it has one."""
    has_text = text_of(error).strip()
    return f"{type(error).__name__}: {first_line(error)[:200]}" if has_text else type(error).__name__


def reason_of(error: BaseException) -> str:
    """Returns type, first line of the text, and the line of code, the user's own if there is one, for a message."""
    reason = type_and_line(error)
    frames = list(traceback.extract_tb(error.__traceback__))
    frames = [one for one in frames if is_the_users(one.filename)] or frames
    return f"{reason} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else reason


MOST_FRAMES = 5
"""Number of the last frames that are shown, whoever wrote the code."""
INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Folders that hold installed packages, of this environment or one that it includes."""
_ENTRIES = frozenset({"train.py", "tune.py", "evaluate.py"})
"""Entry scripts in a project's ``src/``, nearly the same in all projects."""
_NOT_THE_USERS = (
    _OURS,
    _OURS.with_name("hydra_plugins"),
    Path(sysconfig.get_path("stdlib")).resolve(),
)


def shortened(error: BaseException, where_whole: str) -> str:
    """Returns an error's traceback from the user's first frame on: the user's frames and the last `MOST_FRAMES`.

    Args:
        where_whole: where to find all frames, for the message.
    """
    shown = traceback.TracebackException.from_exception(error)
    left_out, link = 0, cast(traceback.TracebackException | None, shown)
    while link is not None:
        frames = list(link.stack)
        own = [number for number, frame in enumerate(frames) if is_the_users(frame.filename)]
        last = range(max([len(frames) - MOST_FRAMES, *own[:1]]), len(frames))
        link.stack[:] = [frame for number, frame in enumerate(frames) if number in own or number in last]
        left_out += len(frames) - len(link.stack)
        link = link.__cause__ or link.__context__
    note = f"({left_out} frames of libraries are left out: {where_whole})\n" if left_out else ""
    return "".join(shown.format()) + note


def is_the_users(filename: str) -> bool:
    """Returns whether code is the user's own: not the engine's, installed, Python's, or an entry script."""
    path = Path(filename).resolve()
    is_others = filename.startswith("<") or not INSTALLED.isdisjoint(path.parts)
    is_entry = path.name in _ENTRIES and (path.parents[1] / "configs" / "train.yaml").is_file()
    return not (is_others or is_entry or any(path.is_relative_to(place) for place in _NOT_THE_USERS))
