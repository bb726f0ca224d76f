"""Holds step and phase of a run. The training loop writes them, the watching threads read them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from wellfed.observe.telemetry.series import TRAINING, Phase


class Progress:
    """Step and phase that a reading belongs to. An update costs the training loop less than a microsecond."""

    def __init__(self, step: int = 0, *, time_s: Callable[[], float] = time.monotonic) -> None:
        """``time_s``: the clock of the readings."""
        self._time_s = time_s
        self.step = step
        """Optimizer steps done."""
        self.phase: Phase = "start"
        self._entered_at_s = time_s()
        self._total_s: dict[Phase, float] = defaultdict(float)
        self._times: dict[Phase, int] = defaultdict(int)
        self.on_edge: Callable[[Phase], None] = lambda left: None
        """Called when training begins or ends, with the phase that is over."""
        self.around: Callable[[Phase], AbstractContextManager[Any]] = lambda phase: nullcontext()
        """Context manager entered around the blocks of `during`."""

    def step_done(self, step: int) -> None:
        """Marks the end of an optimizer step."""
        self.step = step

    def enter(self, phase: Phase, *, is_more: bool = False) -> None:
        """Enters a phase; with ``is_more`` one that goes on, and counts once."""
        self._times[phase] += not is_more
        self._switch(phase)

    def _switch(self, phase: Phase) -> None:
        now_s = self._time_s()
        self._total_s[self.phase] += now_s - self._entered_at_s
        self._entered_at_s = now_s
        if (self.phase in TRAINING) != (phase in TRAINING):
            self.on_edge(self.phase)  # before the phase changes, so that the last reading counts to the old phase
        self.phase = phase

    def spent(self, until_s: float | None = None) -> dict[Phase, tuple[float, int]]:
        """Returns the seconds in each phase so far, and how often it was entered from another.

        Args:
            until_s: time at which the current phase ended; None = it goes on.
        """
        until_s, total_s = self._time_s() if until_s is None else until_s, dict(self._total_s)
        total_s[self.phase] = total_s.get(self.phase, 0.0) + max(0.0, until_s - self._entered_at_s)
        return {phase: (seconds, self._times[phase]) for phase, seconds in total_s.items()}

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Enters a phase for the block, then restores the previous one."""
        before = self.phase
        self.enter(phase)
        try:
            with self.around(phase):
                yield
        finally:
            self._switch(before)
