"""Holds what the executors of Ray and submitit share: each trial is sent away as bytes and comes back as a row."""

from __future__ import annotations

import os
import pickle
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from wellfed import project
from wellfed.config.compose import Composed
from wellfed.config.schema import Accelerator, RunConfig
from wellfed.process import Stopped
from wellfed.study.executors.executor import StudySettings, Trial, TrialEnd
from wellfed.study.executors.node import Needs, closed_by, order_of, process_start
from wellfed.study.executors.tasks import is_for_cpu
from wellfed.study.executors.trial_process import ProcessAnswer
from wellfed.study.row import Row
from wellfed.study.trial_end import started_at


@dataclass(frozen=True)
class Sent:
    """A trial that was handed over."""

    trial: Trial
    order: bytes
    num_gpus: int
    alone: bool
    sent_at_s: float
    earlier: str | None
    """When the run of an earlier attempt in the trial's folder began; None = there is none."""


class RemoteExecutor(ABC):
    """An executor whose trials run in other machines' processes, which some scheduler starts.

    Attributes:
        most_gpus: GPUs of the machine that has most; None = unknown.
    """

    most_gpus: int | None = None

    def __init__(self, settings: StudySettings) -> None:
        self._settings, self._start = settings, process_start()
        self._alive = settings.scratch / f"alive_{os.getpid()}_{time.time_ns()}"
        self._is_closed = False

    def __enter__(self) -> Self:
        self._reach()
        self._alive.touch()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._alive.unlink(missing_ok=True)
        self._leave()

    def run(
        self,
        trials: Sequence[Trial] = (),
        more: Callable[[], Trial | None] | None = None,
        *,
        alone: bool = False,
        prune: Callable[[Trial, int, float], str | None] | None = None,
    ) -> Iterator[tuple[Trial, Row]]:
        """Runs trials as `Executor.run` says; all are handed to the scheduler at once."""
        settings, sent = self._settings, []
        for trial in [*trials, *(iter(more, None) if more is not None else ())]:
            num_gpus = self._num_gpus(trial.composed)
            if self.most_gpus is not None and num_gpus > self.most_gpus:
                message = f"trainer.devices={num_gpus}, and no machine there has more GPUs than {self.most_gpus}."
                end = TrialEnd(not_started="infeasible", message=message)
                yield trial, settings.row_of(trial.row, end, settings.folder)
            else:
                sent.append(self._sent(trial, num_gpus, alone))
        # The libraries wait in native code, where an exception of a signal handler would be lost.
        settings.stop.is_stepping = True
        try:
            for ended in self._ended(sent):
                settings.tick()
                if ended is not None:
                    each, answer = ended
                    yield each.trial, self._row(each, answer)
                if settings.stop.signum is not None:
                    raise Stopped(settings.stop.signum)
        finally:
            settings.stop.is_stepping = False

    def start_no_more(self) -> None:
        """Drops the trials that wait: those that the scheduler starts from now on end at once."""
        self._is_closed = True
        closed_by(self._alive).touch()

    @abstractmethod
    def _reach(self) -> None:
        """Reaches the scheduler, or raises ConfigError."""

    @abstractmethod
    def _leave(self) -> None:
        """Ends every trial that still runs."""

    @abstractmethod
    def _ended(self, sent: Sequence[Sent]) -> Iterator[tuple[Sent, ProcessAnswer] | None]:
        """Hands trials over and yields each when it has ended, and None a few times a second.

        Raises:
            ExecutorLost: the rest can't be run.
        """

    def _sent(self, trial: Trial, num_gpus: int, alone: bool) -> Sent:
        settings = self._settings
        needs = Needs(
            study=str(settings.folder.absolute()),
            alive=str(self._alive.absolute()),
            project=str(project.root()),
            source=project.source_digest(),
            code=settings.code,
            timeout_s=settings.timeout_s,
            prepare_s=settings.prepare_s,
            group=settings.group,
            argv=(str(Path(sys.argv[0]).absolute()), *sys.argv[1:]),
        )
        order = order_of(needs, trial, settings.row_of)
        return Sent(trial, order, num_gpus, alone, time.monotonic(), started_at(settings.folder / trial.row.folder))

    def _num_gpus(self, composed: Composed[RunConfig]) -> int:
        """Returns how many GPUs a trial is given; 0 where it trains on the processor, or no GPU is known of."""
        config, most = composed.config, self.most_gpus
        if is_for_cpu(composed):
            return 0
        is_named = config.trainer.accelerator is Accelerator.gpu or config.gpu.memory_gib is not None
        return config.trainer.devices if most or (most is None and is_named) else 0

    def _row(self, sent: Sent, answer: ProcessAnswer) -> Row:
        if answer.content is not None:
            row: Row = pickle.loads(answer.content)
            return row
        row, folder = sent.trial.row, self._settings.folder
        began = started_at(folder / row.folder)
        is_begun = began is not None and began != sent.earlier
        end = TrialEnd(
            not_started=None if is_begun else "killed",
            is_lost=True,
            message=answer.problem,
            host=answer.host,
            seconds=time.monotonic() - sent.sent_at_s,
        )
        return self._settings.row_of(row, end, folder)
