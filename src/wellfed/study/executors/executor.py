"""Defines an executor: what it is given, what it yields, and the one loop of all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from wellfed.config.compose import Composed
from wellfed.config.schema import RunConfig
from wellfed.process import StopRequest
from wellfed.record.entries import Status
from wellfed.study.row import Row

if TYPE_CHECKING:
    from wellfed.data.backends.first_batches import FirstBatches
    from wellfed.plan.predict.peak import KnownFootprints

Launch = Callable[[str, list[list[str]]], object]
"""Another launcher of Hydra's: gets a folder for its own files, runs each list of overrides, returns at their end."""
TICK_S = 0.5
"""Most seconds that an executor waits for its trials without calling `StudySettings.tick`."""


@dataclass(frozen=True)
class Trial:
    """One run of a study."""

    composed: Composed[RunConfig]
    """Configuration. The executor sets its ``run_dir``."""
    overrides: tuple[str, ...]
    """Overrides that the configuration was composed of."""
    row: Row
    """Everything known before the trial starts. ``row.folder`` names its folder within the study's."""
    is_timed: bool = True
    """True: planned first, then only timed. False: a whole training."""
    may_be_pruned: bool = False
    """The executor calls ``prune`` after each validation of this trial."""

    @property
    def key(self) -> str:
        """Name that no other trial of the study has."""
        return self.row.folder


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
class TrialEnd:
    """How a trial has ended, or why it was not started."""

    code: int = 0
    """Exit code of its process; negative: the signal that ended it."""
    seconds: float = 0.0
    """Duration of the whole trial, from the start of its process."""
    is_timeout: bool = False
    """The executor ended it at the time limit."""
    not_started: Status | None = None
    """Status of a trial that was not started."""
    message: str = ""
    """Why it was not started."""
    host: str = ""
    """Name of the machine."""
    predicted_peak_gib: float | None = None


RowOf = Callable[[Any, TrialEnd, Path], Row]
"""Makes the finished row of a trial from its row, its end and the study's folder."""
Ended = Iterator[tuple[Trial, Row]]
"""Trials that have ended, each with its finished row."""


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
    row_of: RowOf
    say: Callable[[str], None]
    """Shows a sentence to the user."""
    tick: Callable[[], None]
    """Called a few times a second."""
    stop: StopRequest


class ExecutorLost(Exception):
    """Raised when the remaining trials can't be run. The text is a sentence for the user."""


class Executor(ABC):
    """Runs trials. Used as a context: leaving it ends what still runs."""

    def __init__(self, settings: StudySettings) -> None:
        self.settings = settings
        self._queue: deque[Trial] = deque()
        self._is_open = True
        """Trials may still be started."""
        self._running: dict[Any, Any] = {}
        self._alone = False
        self._prune: Callable[[Trial, int, float], str | None] | None = None

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

    def run(
        self,
        trials: Iterable[Trial] = (),
        more: Callable[[], Trial | None] | None = None,
        *,
        alone: bool = False,
        prune: Callable[[Trial, int, float], str | None] | None = None,
    ) -> Ended:
        """Yields each trial with its finished row when it has ended.

        Trials that can't fit are yielded as ``infeasible``, without being started.

        Args:
            trials: trials to run, in order.
            more: returns one more trial, or None if there is none now. It is called only when a machine can run one
                like the last, since the next trial may depend on those that have ended.
            alone: run one trial at a time on a machine.
            prune: returns why to end a trial after a validation (its number from 1, the metric), or None. Local only.

        Raises:
            ExecutorLost: the rest can't be run.
            Stopped: a signal asked for it.
        """
        fit = yield from self._planned(list(trials))
        self._queue, self._alone, self._prune = deque(fit if self._is_open else ()), alone, prune
        while True:
            while self._is_open and self._has_room(self._queue[0] if self._queue else None):
                trial = self._queue.popleft() if self._queue else None if more is None else more()
                if trial is None:
                    break
                yield from self._start(trial)
            if not (self._queue or self._running):
                return
            self.settings.tick()
            yield from self._wait()

    def start_no_more(self) -> None:
        """Drops the trials that wait, now and later. Those that run go on and are yielded."""
        self._is_open = False
        self._queue.clear()

    def _row(self, trial: Trial, end: TrialEnd) -> Row:
        return self.settings.row_of(trial.row, end, self.settings.folder)

    def _planned(self, trials: list[Trial]) -> Generator[tuple[Trial, Row], None, list[Trial]]:
        """Yields the trials that can't be run, and returns the others."""
        yield from ()
        return trials

    def _has_room(self, trial: Trial | None) -> bool:
        """Returns whether a trial can be started now; None = one like the last."""
        return True

    @abstractmethod
    def _start(self, trial: Trial) -> Ended:
        """Starts a trial, or yields it if it can't be run."""

    @abstractmethod
    def _wait(self) -> Ended:
        """Waits up to `TICK_S` and yields the trials that have ended."""
