"""An executor whose trials end as a test says, without processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from wellfed.study.executors.executor import Trial
from wellfed.study.row import Row


class PlayedTrials:
    """Each trial ends as ``play`` makes of its row; those that wait after `start_no_more` are dropped.

    ``curve`` gives the metric at the validations of a trial that may be pruned, until it is.
    """

    def __init__(
        self,
        play: Callable[[Trial], Row] = lambda trial: replace(trial.row, status="ok"),
        curve: Callable[[Trial], Sequence[float]] = lambda trial: (),
    ) -> None:
        self._play, self._curve = play, curve
        self.pruned: dict[str, str] = {}
        """Why a trial was pruned, by its key."""
        self.ran: list[Row] = []
        """Rows of the trials that were begun, in order."""
        self._is_open = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def run(
        self,
        trials: Sequence[Trial] = (),
        more: Callable[[], Trial | None] | None = None,
        *,
        alone: bool = False,
        prune: Callable[[Trial, int, float], Any] | None = None,
    ) -> Iterator[tuple[Trial, Row]]:
        self._is_open = True
        queue = [*trials]
        while self._is_open:
            trial = queue.pop(0) if queue else None if more is None else more()
            if trial is None:
                return
            self.ran.append(trial.row)
            for number, value in enumerate(self._curve(trial) if prune and trial.may_be_pruned else (), start=1):
                if why := prune(trial, number, value) if prune else None:
                    self.pruned[trial.key] = why
                    break
            yield trial, self._play(trial)

    def start_no_more(self) -> None:
        self._is_open = False
