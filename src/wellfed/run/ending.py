"""How a run has ended, as plain data that its ranks can tell one another."""

from __future__ import annotations

from dataclasses import dataclass

from wellfed.errors import EXIT_OK, ErrorKind, WellfedError
from wellfed.record import Status


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    status: Status
    exit_code: int
    kind: ErrorKind | None = None
    message: str = ""
    advice: str = ""
    is_expected: bool = True
    """The message is all a user needs; False = a traceback helps."""
    is_of_other_rank: bool = False
    """This rank has only lost the one that failed, which knows why."""
    by_non_finite_loss: bool = False
    is_of_all: bool = False
    """A stop that all ranks have agreed on: each ends by itself."""


OK = Outcome("ok", EXIT_OK)


class RankEnded(WellfedError):
    """Another rank has ended: this one can't go on."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(f"{outcome.message}\n{outcome.advice}".rstrip())
        self.outcome = outcome
