"""How a run has ended, as plain data that its ranks can tell one another."""

from __future__ import annotations

from dataclasses import dataclass

from wellfed.errors import EXIT_NOTHING_RUN, EXIT_OK, ErrorKind, WellfedError
from wellfed.masking import hidden
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

    def __post_init__(self) -> None:
        for name in ("message", "advice"):
            object.__setattr__(self, name, hidden(getattr(self, name)))

    @property
    def is_refusal(self) -> bool:
        """Nothing was run."""
        return self.exit_code == EXIT_NOTHING_RUN or self.status == "infeasible"


OK = Outcome("ok", EXIT_OK)


class RankEnded(WellfedError):
    """Another rank has ended: this one can't go on."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(f"{outcome.message}\n{outcome.advice}".rstrip())
        self.outcome = outcome
