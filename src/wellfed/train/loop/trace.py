"""Records some steps with torch.profiler, writes a trace for Perfetto, and reports the use of their time."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule, supported_activities

from wellfed.errors import reason_of
from wellfed.observe.timing.step_clock import WARMUP_STEPS
from wellfed.observe.timing.trace_figures import figures
from wellfed.record.entries import OnEvent, ProfileEntry

_LOG = logging.getLogger(__name__)


class ProfilerTrace:
    """Recording of ``steps`` steps after the warm-up. The trace is written after the last one, or at the run's end.

    A failed step is in the trace, but not in the figures. A validation or checkpoint between two recorded steps counts
    to their time.

    Args:
        on_profiled: called once with the figures of the recorded steps, if there are any.
    """

    def __init__(
        self, path: Path, steps: int, on_profiled: Callable[[ProfileEntry], None], on_event: OnEvent
    ) -> None:
        self._path, self._last = path, WARMUP_STEPS + steps
        self._on_profiled, self._on_event = on_profiled, on_event
        self._num_ended = 0
        self._profiler: profile | None = None

    def begin(self, device: torch.device) -> None:
        """Begins to count steps."""
        # Kineto, torch's recorder, prints each start and stop to stderr.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        when = schedule(wait=WARMUP_STEPS - 1, warmup=1, active=self._last - WARMUP_STEPS, repeat=1)
        activities = {ProfilerActivity.CPU}
        if device.type == "cuda":  # torch prints frames where its build can't record a card
            activities |= {ProfilerActivity.CUDA} & supported_activities()  # type: ignore[no-untyped-call]
        self._profiler = profile(activities=activities, schedule=when, on_trace_ready=self._write)
        self._profiler.start()

    @property
    def is_recording(self) -> bool:
        """Returns whether the step that runs is no measure: it is recorded, or the trace was written before it."""
        return WARMUP_STEPS <= self._num_ended <= self._last

    def step_ended(self) -> None:
        """Counts a step, and writes the trace after the last one."""
        self._num_ended += 1
        if self._profiler is None:
            return
        if torch.cuda.is_initialized() and self._num_ended in (WARMUP_STEPS, self._last):  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()  # the device is idle before the first step and after the last
        if self._num_ended == self._last:
            self.close()
        else:
            self._profiler.step()

    def close(self) -> None:
        """Stops recording, and writes what there is. A profiler that still records when Python ends kills the process
        by a signal."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        if self._num_ended <= WARMUP_STEPS:
            _LOG.warning("No step was profiled: training ended before its step %d.", WARMUP_STEPS + 1)
        try:
            profiler.stop()
        except Exception as error:  # noqa: BLE001  a trace is no reason to lose a run
            _LOG.warning("The steps could not be profiled: %s", reason_of(error))
            self._on_event("profile_failed", message=reason_of(error))

    def _write(self, profiler: profile) -> None:
        if self._num_ended > WARMUP_STEPS:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self._path))
            events = profiler.events()  # type: ignore[no-untyped-call]
            if (found := figures(events, self._num_ended - WARMUP_STEPS)) is not None:
                self._on_profiled(found)
