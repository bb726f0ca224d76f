"""Holds what the executors of Ray and submitit share: each trial is sent away as bytes and comes back as a row."""

from __future__ import annotations

import os
import pickle
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from wellfed.config.compose import Composed
from wellfed.config.schema import Accelerator, RunConfig
from wellfed.process import Stopped
from wellfed.study.executors.executor import Ended, Executor, StudySettings, Trial, TrialEnd
from wellfed.study.executors.node import Needs, closed_by, needs_of, order_of, process_start
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
    sent_at_s: float
    earlier: str | None
    """When the run of an earlier attempt in the trial's folder began; None = there is none."""


class RemoteExecutor(Executor):
    """An executor whose trials run in other machines' processes, which some scheduler starts.

    Attributes:
        most_gpus: GPUs of the machine that has most; None = unknown.
    """

    most_gpus: int | None = None

    def __init__(self, settings: StudySettings) -> None:
        super().__init__(settings)
        self._process = process_start()
        self._alive = settings.scratch / f"alive_{os.getpid()}_{time.time_ns()}"
        self._running: dict[Any, Sent] = {}
        """Trials by the scheduler's own handles."""

    def _reach(self) -> None:
        self._connect()
        self._alive.touch()
        # The libraries wait in native code, where an exception of a signal handler would be lost.
        self.settings.stop.is_stepping = True

    def _leave(self) -> None:
        self.settings.stop.is_stepping = False
        self._alive.unlink(missing_ok=True)
        self._disconnect()

    def start_no_more(self) -> None:
        """Drops the trials that wait: those that the scheduler starts from now on end at once."""
        super().start_no_more()
        closed_by(self._alive).touch()

    @cached_property
    def _needs(self) -> Needs:
        return needs_of(self.settings, self._alive)

    def _start(self, trial: Trial) -> Ended:
        num_gpus = self._num_gpus(trial.composed)
        if self.most_gpus is not None and num_gpus > self.most_gpus:
            message = f"trainer.devices={num_gpus}, and no machine there has more GPUs than {self.most_gpus}."
            yield trial, self._row(trial, TrialEnd(not_started="infeasible", message=message))
            return
        order = order_of(self._needs, self.settings, trial)
        earlier = started_at(self.settings.folder / trial.row.folder)
        self._submit(Sent(trial, order, num_gpus, time.monotonic(), earlier))

    def _wait(self) -> Ended:
        for sent, answer in self._answers():
            yield sent.trial, self._answered(sent, answer)
        if self.settings.stop.signum is not None:
            raise Stopped(self.settings.stop.signum)

    @abstractmethod
    def _connect(self) -> None:
        """Reaches the scheduler, or raises ConfigError."""

    @abstractmethod
    def _disconnect(self) -> None:
        """Ends every trial that still runs."""

    @abstractmethod
    def _submit(self, sent: Sent) -> None:
        """Hands a trial over."""

    @abstractmethod
    def _answers(self) -> Sequence[tuple[Sent, ProcessAnswer]]:
        """Waits up to `TICK_S` and returns the trials that have ended.

        Raises:
            ExecutorLost: the rest can't be run.
        """

    def _num_gpus(self, composed: Composed[RunConfig]) -> int:
        """Returns how many GPUs a trial is given; 0 where it trains on the processor, or no GPU is known of."""
        config, most = composed.config, self.most_gpus
        if is_for_cpu(composed):
            return 0
        is_named = config.trainer.accelerator is Accelerator.gpu or config.gpu.memory_gib is not None
        return config.trainer.devices if most or (most is None and is_named) else 0

    def _answered(self, sent: Sent, answer: ProcessAnswer) -> Row:
        if answer.content is not None:
            row: Row = pickle.loads(answer.content)
            return row
        began = started_at(self.settings.folder / sent.trial.row.folder)
        is_begun = began is not None and began != sent.earlier
        end = TrialEnd(
            not_started=None if is_begun else "killed",
            is_lost=True,
            message=answer.problem,
            host=answer.host,
            seconds=time.monotonic() - sent.sent_at_s,
        )
        return self._row(sent.trial, end)
