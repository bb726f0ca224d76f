"""Measures the rate of training without loading: before a timed training, and after a run."""

from __future__ import annotations

import logging
from itertools import islice
from typing import Any

from wellfed.batches import Delivery
from wellfed.errors import reason_of
from wellfed.observe.timing.step_clock import WARMUP_STEPS
from wellfed.run.outcome import lost_rank
from wellfed.run.passes.learner import Learner
from wellfed.run.screen import Terminal
from wellfed.train.lightning.ceiling import CEILING_BATCHES, run_ceiling, whole
from wellfed.units import show_duration

_LOG = logging.getLogger(__name__)
_CEILING_S, _CEILING_FRAC = 10.0, 0.05
"""Maximum time of the ceiling: seconds, or this share of the training time, if that is more."""
_FEWEST = 5
"""Minimum number of timed steps, unless fewer were requested."""


class CeilingPass:
    """Steps on batches that are already on the device."""

    def __init__(self, learner: Learner, loader: Any) -> None:
        """``loader``: the loader of training."""
        self._learner, self._loader = learner, loader
        telemetry = learner.config.telemetry
        self._steps = telemetry.ceiling_steps if telemetry.enabled else 0

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
        wall, known = self._learner.books.wall.entry(), self._learner.books.journal.summary()
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
        learner, journal = self._learner, self._learner.books.journal
        learner.begin_pass()
        learner.books.progress.enter("ceiling")
        deliveries: list[Delivery] = []
        failure, summary = None, None
        try:
            deliveries = whole(self._first_batches()) if steps else []
        except Exception as error:  # noqa: BLE001  only a figure is lost; `run_ceiling` stops the other ranks
            failure = error
        folder, data_module = learner.books.folder, learner.objects.data_module
        try:
            summary = run_ceiling(
                learner.module, deliveries, learner.options, steps, folder, data_module, learner.parts()
            )
        except Exception as error:  # noqa: BLE001  the user's step may fail outside of training
            failure = error
        if failure is not None:
            message = "another rank failed in it" if lost_rank(failure) else reason_of(failure)
            _LOG.warning("The ceiling could not be measured: %s", message)
            _LOG.info("it ended by", exc_info=failure)
            journal.event("ceiling_failed", message=message)
        return None if summary is None else summary.samples_per_s

    def _first_batches(self) -> list[Delivery]:
        """Returns the first batches of an epoch from the loader of training, which continues after them."""
        loader = self._loader
        loader.load_state_dict({**loader.state_dict(), "epoch": loader.epoch, "batch": 0})
        try:
            return list(islice(loader, CEILING_BATCHES))
        finally:
            loader.close()
