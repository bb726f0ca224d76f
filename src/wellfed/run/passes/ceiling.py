"""Measures the rate of training without loading: before a timed training, and after a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from wellfed.batches import Delivery
from wellfed.config.schema import RunConfig
from wellfed.errors import reason_of
from wellfed.observe.timing.readiness import StepSummary
from wellfed.observe.timing.step_clock import WARMUP_STEPS
from wellfed.run.bookkeeper import Bookkeeper
from wellfed.run.outcome import lost_rank
from wellfed.run.screen import Terminal
from wellfed.train.loop.ceiling import CEILING_BATCHES, whole
from wellfed.units import show_duration

_LOG = logging.getLogger(__name__)
_CEILING_S, _CEILING_FRAC = 10.0, 0.05
"""Maximum time of the ceiling: seconds, or this share of the training time, if that is more."""
_FEWEST = 5
"""Minimum number of timed steps, unless fewer were requested."""
RunCeiling = Callable[[Sequence[Delivery], int], StepSummary | None]
"""Function that times so many steps on these batches, on the device. All ranks call it, also without batches."""


class Ceiling:
    """Steps on batches that are already on the device."""

    def __init__(
        self, config: RunConfig, books: Bookkeeper, first: Callable[[], list[Delivery]], run: RunCeiling
    ) -> None:
        """``first``: returns the first batches of an epoch."""
        self._books, self._first, self._run = books, first, run
        self._steps = config.telemetry.ceiling_steps if config.telemetry.enabled else 0

    def warm_up(self) -> float | None:
        """Does a few steps before a timed training, and returns their rate as `measure` does. Training continues after
        these batches, so all of its batches are equally new to caches."""
        rate = self._rate(max(1, self._steps))
        return rate if self._steps else None

    def measure(self, console: Terminal) -> float | None:
        """Returns samples/s on batches already on the device; None if not requested, or if it fails.

        Takes about `_CEILING_S`, or `_CEILING_FRAC` of the training time if that is more. A failure is an event, and
        changes nothing of the finished run.
        """
        if not self._steps:
            return None
        wall, known = self._books.wall.entry(), self._books.journal.summary()
        most_s, steps = max(_CEILING_S, _CEILING_FRAC * (wall["total_s"] if wall else 0.0)), self._steps
        if known is not None:
            step_s = 1e-3 * known.time["step_ms_mean"]
            alone_s = max(step_s * (1 - known.time["wait_frac"]), 1e-9)
            steps = min(steps, int((most_s - CEILING_BATCHES * step_s) / alone_s) - WARMUP_STEPS)
            if steps < min(_FEWEST, self._steps):
                steps = 0
                console.print(f"The ceiling is not measured: that would take longer than {show_duration(most_s)}.")
        return self._rate(steps)

    def _rate(self, steps: int) -> float | None:
        self._books.progress.enter("ceiling")
        deliveries: list[Delivery] = []
        failure, summary = None, None
        try:
            deliveries = whole(self._first()) if steps else []
        except Exception as error:  # noqa: BLE001  only a figure is lost; the other ranks stop too
            failure = error
        try:
            summary = self._run(deliveries, steps)
        except Exception as error:  # noqa: BLE001  the user's step may fail outside of training
            failure = error
        if failure is not None:
            message = "another rank failed in it" if lost_rank(failure) else reason_of(failure)
            _LOG.warning("The ceiling could not be measured: %s", message)
            _LOG.info("it ended by", exc_info=failure)
            self._books.journal.event("ceiling_failed", message=message)
        return None if summary is None else summary.samples_per_s
