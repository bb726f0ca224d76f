"""Defines an executor: what it is given, and what it yields."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from wellfed.config.compose import Composed
from wellfed.config.schema import RunConfig
from wellfed.process import StopRequest
from wellfed.record.entries import Status
from wellfed.study.trial_end import Trial, TrialEnd

if TYPE_CHECKING:
    from wellfed.data.backends.first_batches import FirstBatches
    from wellfed.plan.predict.peak import KnownFootprints

Launch = Callable[[str, list[list[str]]], object]
"""Another launcher of Hydra's: gets a folder for its own files, runs each list of overrides, returns at their end."""
Prune = Callable[[Trial, int, float], str | None]
"""Returns why to end a trial after a validation (its number from 1, the metric), or None."""
More = Callable[[], Trial | None]
"""Returns one more trial, or None if there is none now."""
Ended = Iterator[tuple[Trial, TrialEnd]]
"""Trials that have ended, or that can't be started."""


@dataclass(frozen=True)
class PointPlan:
    """Facts about a point that are known before it runs. Its trials need not find them again."""

    point: str
    """Id of the point."""
    problem: str | None = None
    """Why it can't be run."""
    status: Status = "infeasible"
    """Status of its row in that case."""
    predicted_peak_gib: float | None = None
    first_batches: FirstBatches | None = None
    footprints: KnownFootprints | None = None


@dataclass(frozen=True)
class StudySettings:
    """Settings that all trials of a study share."""

    folder: Path
    """Folder of the study."""
    scratch: Path
    """Folder for temporary files, which exists while trials run."""
    timeout_s: float
    """Time limit of a trial; infinite = none."""
    prepare_s: float
    """Time limit of making data and model."""
    group: str
    """``sweep`` or ``search``: the group with the knobs that advice names."""
    say: Callable[[str], None]
    """Shows a sentence to the user."""
    stop: StopRequest


class ExecutorLost(Exception):
    """Raised when the remaining trials can't be run. The text is a sentence for the user."""


class Executor(ABC):
    """Runs trials. Used as a context: leaving it ends what still runs."""

    def __init__(self, settings: StudySettings) -> None:
        self.settings = settings
        self._is_open = True
        """Trials may still be started."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:  # noqa: B027  a launcher has nothing to end
        """Ends every trial that still runs."""

    def expect(self, composed: Composed[RunConfig], *, is_one: bool) -> None:  # noqa: B027  only a local one can
        """Begins to prepare trials of a configuration. The study composes others meanwhile.

        Args:
            composed: configuration of the first trial.
            is_one: all trials have its data and model.
        """

    @abstractmethod
    def run(
        self, trials: Iterable[Trial] = (), more: More | None = None, *, alone: bool = False, prune: Prune | None = None
    ) -> Ended:
        """Yields each trial when it has ended. Trials that can't fit are yielded without being started.

        Args:
            trials: trials to run, in order.
            more: gives further trials. It is called only when a machine can run one like the last, since the next
                trial may depend on those that have ended.
            alone: run one trial at a time on a machine.
            prune: ends trials early. Local only.

        Raises:
            ExecutorLost: the rest can't be run.
            Stopped: a signal asked for it.
        """

    def start_no_more(self) -> None:
        """Drops the trials that wait, now and later. Those that run go on and are yielded."""
        self._is_open = False
