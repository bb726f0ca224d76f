"""Collects the figures of one rank, and brings those of all ranks to rank 0 while they train."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import psutil

from wellfed.observe.timing.interval import error_of_mean, student_t
from wellfed.observe.timing.readiness import Rows, StepTable, summarise
from wellfed.record.entries import RankEntry
from wellfed.run.outcome import RankEnded

_LOG = logging.getLogger(__name__)
EVERY_S = 30.0
"""Minimum seconds between two reports of a rank's figures while it trains."""
_LATEST = 2_000
"""Number of latest steps that a report covers. More would hold up the training for longer."""
_FEWEST_TIMED = 5
"""Minimum number of steps whose phases were timed, for an interval."""
_KIND, _LAST_KIND = "figures of ranks", "figures of ranks at the end"
_OF_TIME = (
    *("wait_frac", "copy_frac", "compute_frac", "host_frac", "step_ms_mean"),
    *("forward_frac", "backward_frac", "optimizer_frac"),
)


class RankFigures:
    """Reports of this rank to rank 0, which records the latest report of each rank. A single rank reports nothing.

    A report never waits for another rank. It is left in the store of rank 0, where the last one stays when its rank
    has ended. A report that fails is logged, and the training goes on.

    Args:
        about: rank, node and GPU.
        others: `Exchange` of the ranks, or what has its ``publish``, ``latest`` and ``gather``; None = this rank trains
            alone.
        rows: returns the rows of the steps so far.
        peak_gib: returns the peak of memory of this rank so far.
        record: records the figures of all ranks.
    """

    def __init__(
        self,
        about: dict[str, Any],
        others: Any,
        *,
        rows: Callable[[], Rows],
        peak_gib: Callable[[], float | None],
        record: Callable[[Sequence[RankEntry]], None],
    ) -> None:
        self._about, self._others = about, others
        self._rows, self._peak_gib, self._record = rows, peak_gib, record
        self._due_s = time.monotonic() + EVERY_S

    def stepped(self) -> bool:
        """Reports after a step if `EVERY_S` have passed. Returns whether rank 0 has recorded new figures."""
        if self._others is None or time.monotonic() < self._due_s:
            return False
        self._due_s = time.monotonic() + EVERY_S
        self.report()
        return self.record_latest()

    def record_latest(self) -> bool:
        """Records, on rank 0, the latest report of each rank. Returns whether there was any."""
        known: list[RankEntry] = []
        if self._others is not None:
            with _logged():
                known = [one for one in self._others.latest(_KIND) if one is not None]
        if known:
            self._record(known)
        return bool(known)

    def compare(self) -> None:
        """Records the figures of each rank on rank 0, at the end of training. All ranks must call it.

        Raises:
            RankEnded: a rank has failed. Its last report is recorded by `record_latest`.
        """
        if self._others is not None:
            found = [one for one in self._others.gather(_LAST_KIND, self.report()) if one is not None]
            if found:
                self._record(found)

    def report(self) -> RankEntry | None:
        """Leaves this rank's figures for rank 0 and returns them; None if there are none."""
        own: RankEntry | None = None
        with _logged():
            own = self._own()
            if own is not None and self._others is not None:
                self._others.publish(_KIND, own)
        return own

    def _own(self) -> RankEntry | None:
        """Returns the figures of this rank so far; None before the first step after the warm-up."""
        latest = StepTable.of(self._rows()).latest(_LATEST)
        found = summarise(latest)
        if found is None:
            return None
        return {  # type: ignore[return-value]  # keys from several places
            **self._about,
            "host": socket.gethostname(),
            **{name: value for name, value in found.time.items() if name in _OF_TIME},
            "readiness_frac": found.readiness_frac,
            "steps": found.steps,
            **half_widths_ms(latest.steady()),
            "peak_gib": self._peak_gib(),
        }


@contextmanager
def _logged() -> Iterator[None]:
    """Logs what could not be read. The training finds out by itself that a rank has ended."""
    try:
        with suppress(RankEnded):
            yield
    except (OSError, psutil.Error) as error:  # no file handle is left, for example
        _LOG.warning("The figures of this rank could not be read: %s.", error)


def half_widths_ms(steady: StepTable) -> dict[str, float | None]:
    """Returns ``between_half_ms`` and ``work_half_ms`` of a `RankEntry`; None with too few steps. A device times the
    phases of some steps alone."""
    clock = "device_" if steady.has_copies else ""
    between_ms = steady.column("wait_ms") + np.nan_to_num(steady.column("copy_ms")) + steady.column("host_ms")
    phases_ms = steady.column(f"{clock}forward_ms") + np.nan_to_num(steady.column(f"{clock}optimizer_ms"))
    work_ms = (between_ms + phases_ms)[np.isfinite(phases_ms)]
    return {"between_half_ms": _half_width(between_ms.tolist()), "work_half_ms": _half_width(work_ms.tolist())}


def _half_width(values: Sequence[float]) -> float | None:
    """Returns half the 95 % interval of the mean; None with too few values."""
    if len(values) < _FEWEST_TIMED:
        return None
    return student_t(len(values) - 1) * error_of_mean(values)
