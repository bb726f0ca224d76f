"""An executor whose trials end as a test says, without processes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from wellfed.process import StopRequest
from wellfed.study.executors.executor import Ended, Executor, StudySettings, Trial
from wellfed.study.row import Row
from wellfed.study.trial_end import RowMaker


class PlayedTrials(Executor):
    """Each trial ends as ``play`` makes of its row; those that wait after `start_no_more` are dropped.

    ``curve`` gives the metric at the validations of a trial that may be pruned, until it is.
    """

    def __init__(
        self,
        play: Callable[[Trial], Row] = lambda trial: replace(trial.row, status="ok"),
        curve: Callable[[Trial], Sequence[float]] = lambda trial: (),
    ) -> None:
        none = Path()
        super().__init__(
            StudySettings(none, none, 1, 1, "sweep", RowMaker(), str, lambda: None, StopRequest())  # type: ignore[arg-type]
        )
        self._play, self._curve = play, curve
        self.pruned: dict[str, str] = {}
        """Reason for which a trial was pruned, by its key."""
        self.ran: list[Row] = []
        """Rows of the trials that were begun, in order."""

    def _has_room(self, trial: Trial | None) -> bool:
        return not self._running

    def _start(self, trial: Trial) -> Ended:
        self.ran.append(trial.row)
        self._running[trial.key] = trial
        yield from ()

    def _wait(self) -> Ended:
        for key in list(self._running):
            trial = self._running.pop(key)
            prune = self._prune if trial.may_be_pruned else None
            for number, value in enumerate(self._curve(trial) if prune else (), start=1):
                if why := prune(trial, number, value) if prune else None:
                    self.pruned[key] = why
                    break
            yield trial, self._play(trial)
