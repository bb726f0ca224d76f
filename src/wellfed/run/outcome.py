"""Defines how a run has ended, as plain data that ranks can exchange."""

from __future__ import annotations

from dataclasses import dataclass

from wellfed.errors import EXIT_NOTHING_RUN, EXIT_OK, ErrorKind, WellfedError
from wellfed.masking import hidden
from wellfed.record.entries import Status


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
    is_of_all: bool = False
    """True: all ranks have agreed to stop."""

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
