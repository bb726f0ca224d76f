"""Records some steps with torch.profiler, writes a trace for Perfetto, and reports the use of their time."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule, supported_activities

from wellfed.errors import reason_of
from wellfed.observe.timing.step_clock import WARMUP_STEPS
from wellfed.observe.timing.trace_figures import figures
from wellfed.record.entries import OnEvent, ProfileEntry

_LOG = logging.getLogger(__name__)


def record_steps(
    path: Path, steps: int, on_profiled: Callable[[ProfileEntry], None], on_event: OnEvent
) -> Generator[bool]:
    """Records ``steps`` steps after the warm-up. Call ``next`` at the end of each step; it returns whether the next
    step is slowed by the recording. The trace is written after the last recorded step, or by ``close``.

    A failed step is in the trace, but not in the figures. A validation or checkpoint between two recorded steps counts
    to their time.

    Args:
        on_profiled: called once with the figures of the recorded steps, if there are any.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # Kineto, torch's recorder, prints each start and stop to stderr
    activities, num_recorded = {ProfilerActivity.CPU}, 0
    is_on_gpu: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    wait: Callable[[], None] = torch.cuda.synchronize if is_on_gpu else (lambda: None)  # idle before and after steps
    if is_on_gpu:
        # torch prints frames where its build can't record a card
        activities |= {ProfilerActivity.CUDA} & supported_activities()  # type: ignore[no-untyped-call]

    def write(profiler: profile) -> None:
        if num_recorded:
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
            events = profiler.events()  # type: ignore[no-untyped-call]
            if (found := figures(events, num_recorded)) is not None:
                on_profiled(found)

    try:
        for _ in range(WARMUP_STEPS - 2):
            yield False
        # A profiler that still records when Python ends kills the process by a signal.
        with profile(
            activities=activities, schedule=schedule(wait=0, warmup=1, active=steps), on_trace_ready=write
        ) as it:
            yield False
            wait()
            for _ in range(steps):
                it.step()
                yield True
                num_recorded += 1
            wait()
        yield True  # writing the trace took time, too
    except GeneratorExit:  # the training is over
        if not num_recorded:
            _LOG.warning("No step was profiled: training ended before its step %d.", WARMUP_STEPS + 1)
        raise
    except Exception as error:  # noqa: BLE001  a trace is no reason to lose a run
        _LOG.warning("The steps could not be profiled: %s", reason_of(error))
        on_event("profile_failed", message=reason_of(error))
