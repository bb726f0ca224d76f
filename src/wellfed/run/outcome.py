"""Defines how a run has ended, as plain data that ranks can exchange, and derives it from an exception."""

from __future__ import annotations

import errno
import re
import signal
from dataclasses import dataclass, replace

from wellfed.errors import (
    ENDED_WORKER,
    EXIT_FAILED,
    EXIT_NOTHING_RUN,
    EXIT_OK,
    EXIT_OUT_OF_MEMORY,
    KILLED_WORKER,
    LESS_HOST_MEMORY,
    DoesNotFit,
    ErrorKind,
    OutOfMemoryExhausted,
    WellfedError,
)
from wellfed.masking import hidden
from wellfed.process import Stopped, exit_code_of
from wellfed.record.entries import Status

_CARD_MEMORY_ADVICE = "A smaller memory.micro_batch, memory.features=dynamic or cache_host, or a smaller model."
_HOST_ADVICE = (
    f"It is the host's memory: {LESS_HOST_MEMORY}, memory.features=dynamic; and where the CPU trains, a smaller "
    "memory.micro_batch or model."
)
# Errors of Gloo, of NCCL (https://github.com/NVIDIA/nccl, init.cc) and of the store of torch.distributed.
_RANK_GONE = re.compile(
    r".*(Connection (closed by peer|reset by peer|refused)|Broken pipe|remote process exited|ncclRemoteError|"
    r"Socket Timeout|Timed out waiting \d+ms for (recv|send)|failed to recv, got 0 bytes).*"
)

_IN_WORKER = re.compile(r"Caught \w+ (in DataLoader worker process \d+)")
"""Begin of the text under which torch raises a worker's error in the training process."""


@dataclass(frozen=True)
class Outcome:
    """Status, exit code and message of a finished run."""

    status: Status
    exit_code: int
    kind: ErrorKind | None = None
    message: str = ""
    advice: str = ""
    is_expected: bool = True
    """True: the message suffices. False: a traceback helps."""
    is_of_other_rank: bool = False
    """True: another rank has failed, and reports the reason."""
    by_non_finite_loss: bool = False

    def __post_init__(self) -> None:
        for name in ("message", "advice"):
            object.__setattr__(self, name, hidden(getattr(self, name)))

    @property
    def is_refusal(self) -> bool:
        """Whether nothing was run."""
        return self.exit_code == EXIT_NOTHING_RUN or self.status == "infeasible"


OK = Outcome("ok", EXIT_OK)


class RankEnded(WellfedError):
    """Raised when another rank has ended and this one can't continue."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(f"{outcome.message}\n{outcome.advice}".rstrip())
        self.outcome = outcome


def outcome_of(error: BaseException, *, has_trained: bool) -> Outcome:
    """Returns the outcome of a run that this exception ended. Imports torch.

    Args:
        has_trained: whether the first batch was requested. Before that nothing was run.
    """
    from wellfed.train.memory import oom
    from wellfed.train.step.non_finite import NonFiniteLoss

    failed = EXIT_FAILED if has_trained else EXIT_NOTHING_RUN
    if isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt):
        error = error.__context__  # Lightning turns it into an exit
    if isinstance(error, (Stopped, KeyboardInterrupt)):
        signum = error.signum if isinstance(error, Stopped) else signal.SIGINT
        return Outcome("interrupted", exit_code_of(signum), None, str(error))
    if isinstance(error, RankEnded):
        return replace(error.outcome, is_of_other_rank=True)
    if isinstance(error, OutOfMemoryExhausted):
        return Outcome("oom", EXIT_OUT_OF_MEMORY, error.kind, str(error))
    if isinstance(error, DoesNotFit):
        return Outcome("infeasible", EXIT_OUT_OF_MEMORY, "device_oom", str(error))
    memory = oom.classify(error)
    if memory is not None:
        advice = _HOST_ADVICE if memory.kind == "host_oom" else _CARD_MEMORY_ADVICE
        return Outcome("oom", EXIT_OUT_OF_MEMORY, memory.kind, memory.message, advice)
    notes = getattr(error, "__notes__", ())  # name the sample or batch
    if isinstance(error, NonFiniteLoss):
        return Outcome("failed", EXIT_FAILED, "code", str(error), " ".join(notes), by_non_finite_loss=True)
    noted = "".join(f" ({note})" for note in notes)
    if isinstance(error, WellfedError):
        return Outcome("failed", failed, error.kind, f"{error}{noted}")
    if (lost := oom.lost_worker(error)) is not None:
        if "exited unexpectedly with exit code" in lost:
            return Outcome("failed", failed, "data", lost, f"{ENDED_WORKER[0].upper()}{ENDED_WORKER[1:]}")
        return Outcome("failed", failed, "worker", lost, f"A worker process ended, {KILLED_WORKER}")
    if (gone := lost_rank(error)) is not None:
        message = f"Another rank has ended, and this one can't go on alone: {gone}"
        return Outcome("failed", failed, "code", message, "The error of that rank comes first.", is_of_other_rank=True)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Outcome("failed", failed, "disk", str(error), "Free space, or set paths.log_dir and paths.cache_dir.")
    message = _of_worker(error) or f"{type(error).__name__}: {error}"
    return Outcome("failed", failed, "code", f"{message}{noted}", is_expected=False)


def _of_worker(error: BaseException) -> str | None:
    """Returns the last line of an error that a worker of a DataLoader has sent, without its traceback; else None."""
    lines = str(error).strip().splitlines()
    found = _IN_WORKER.match(lines[0]) if lines else None
    return None if found is None else f"{lines[-1].strip()} ({found.group(1)})"


def lost_rank(error: BaseException) -> str | None:
    """Returns the text of an error about a broken connection to another rank; None for other errors."""
    import torch.distributed as dist

    if not (isinstance(error, RuntimeError) and dist.is_available() and dist.is_initialized()):
        return None
    gone = _RANK_GONE.search(str(error))
    return None if gone is None else gone.group().strip()
