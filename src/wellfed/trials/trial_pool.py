"""Runs trials in stems: which one is started when and where, how long it may take, what is told when it ends."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from wellfed.config.schema import RunConfig
from wellfed.trials.fork_server import Ended, Job, Stem, StemFailed
from wellfed.trials.slots import Place, Slots

_MOST_STEMS = 3
"""That hold their data and model at one time."""
_TICK_S = 0.5


@dataclass(frozen=True)
class Trial:
    """One process to be."""

    key: str
    """Tells trials apart."""
    shared: str
    """Trials of the same data and model have it in common."""
    config: RunConfig
    task: Any
    folder: Path
    num_gpus: int = 0
    """0 = it trains on the processor."""


@dataclass
class _Running:
    trial: Trial
    stem: Stem[Any]
    place: Place
    ends_s: float
    began_s: float
    timed_out: bool = False


class Stems:
    """A stem for each data and model, made when first asked for; the oldest goes where there are too many.

    Args:
        prepare: what a stem of a configuration prepares.
        work: what its processes do.
        log: of a stem, by its number.
        timeout_s: for preparing.
    """

    def __init__(
        self,
        prepare: Callable[[RunConfig], Any],
        work: Callable[[Any, Any], int],
        log: Callable[[int], Path],
        timeout_s: float,
    ) -> None:
        self._prepare, self._work, self._log, self._timeout_s = prepare, work, log, timeout_s
        self._stems: dict[str, Stem[Any]] = {}
        self._numbers: dict[str, int] = {}

    def get(self, shared: str, config: RunConfig, busy: Iterable[Stem[Any]] = ()) -> Stem[Any]:
        """The stem of what is shared.

        Args:
            busy: stems that must stay.

        Raises:
            StemFailed: it could not be prepared.
        """
        if shared in self._stems:
            return self._stems[shared]
        for old in list(self._stems)[: max(0, len(self._stems) - _MOST_STEMS + 1)]:
            if self._stems[old] not in busy:
                self._stems.pop(old).close()
        number = self._numbers.setdefault(shared, len(self._numbers) + 1)
        stem = Stem(lambda: self._prepare(config), self._work, self._log(number))
        self._stems[shared] = stem
        try:
            stem.wait_ready(self._timeout_s)
        except BaseException:
            self.drop(stem)
            raise
        return stem

    def drop(self, stem: Stem[Any]) -> None:
        """It has died, or is to."""
        self._stems = {shared: each for shared, each in self._stems.items() if each is not stem}
        stem.close()

    def close(self) -> None:
        """End all of them, and with them what they run."""
        for stem in list(self._stems.values()):
            self.drop(stem)


@dataclass
class Trials:
    """The trials of a sweep, from a queue into the places there are.

    Args:
        timeout_s: for each trial.
        on_start: told before a trial is started; makes its folder.
        on_end: told what became of it; False = start no more.
        on_failed: told that its data and model could not be prepared; False = start no more.
        on_tick: called a few times a second.
    """

    stems: Stems
    slots: Slots
    timeout_s: float
    on_start: Callable[[Trial], None]
    on_end: Callable[[Trial, Ended, bool], bool]
    on_failed: Callable[[Trial, StemFailed], bool]
    on_tick: Callable[[], None]
    _running: dict[str, _Running] = field(default_factory=dict)

    def run(self, trials: Iterable[Trial]) -> None:
        """Until all have ended."""
        queue = deque(trials)
        while queue or self._running:
            while queue and self._start(queue):
                pass
            self.on_tick()
            if not self._take():
                queue.clear()

    def _start(self, queue: deque[Trial]) -> bool:
        """Start the next; False if there is no place for it now."""
        trial = queue[0]
        place = self.slots.take(trial.num_gpus)
        if place is None:
            return False
        queue.popleft()
        try:
            stem = self._stem_of(trial)
            self.on_start(trial)
            job = Job(trial.key, trial.folder, trial.task, place.environment, place.cpus)
            try:
                stem.start(job)
            except StemFailed:  # it has died since it was last heard of
                if not self._all_died(stem):
                    queue.clear()
                stem = self._stem_of(trial)
                stem.start(job)
        except StemFailed as failed:
            self.slots.give_back(place)
            if not self.on_failed(trial, failed):
                queue.clear()
            return True
        now_s = time.monotonic()
        self._running[trial.key] = _Running(trial, stem, place, now_s + self.timeout_s, now_s)
        return True

    def _stem_of(self, trial: Trial) -> Stem[Any]:
        return self.stems.get(trial.shared, trial.config, [each.stem for each in self._running.values()])

    def _take(self) -> bool:
        """Wait a little for what ends; False = start no more."""
        if not self._running:
            return True
        goes_on = True
        now_s = time.monotonic()
        for each in self._running.values():
            if now_s >= each.ends_s and not each.timed_out:
                each.timed_out = True
                each.stem.kill(each.trial.key)
        stems = {id(each.stem.connection): each.stem for each in self._running.values()}
        for ready in wait([stem.connection for stem in stems.values()], timeout=_TICK_S):
            stem = stems[id(ready)]
            try:
                ended = stem.take()
            except StemFailed:
                goes_on = self._all_died(stem) and goes_on
                continue
            goes_on = self._end(self._running.pop(ended.key), ended) and goes_on
        return goes_on

    def _end(self, running: _Running, ended: Ended) -> bool:
        self.slots.give_back(running.place)
        # It may have ended well just then.
        return self.on_end(running.trial, ended, running.timed_out and ended.code == -signal.SIGKILL)

    def _all_died(self, stem: Stem[Any]) -> bool:
        self.stems.drop(stem)
        goes_on = True
        for key in [key for key, each in self._running.items() if each.stem is stem]:
            running = self._running.pop(key)
            ended = Ended(key, -signal.SIGKILL, time.monotonic() - running.began_s)
            goes_on = self._end(running, ended) and goes_on
        return goes_on
