"""Brings the figures of a script's ranks to rank 0, beside the script's own process groups.

torchrun serves a store, at which the groups of its ranks meet. Each rank connects to it once more and leaves its
figures there. No rank waits for another one, except rank 0 at its end, for `LATE_S`.
"""

from __future__ import annotations

import itertools
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch

from wellfed.errors import EXIT_FAILED, first_line
from wellfed.observe.telemetry.host import peak_rss_bytes
from wellfed.observe.timing.readiness import Rows
from wellfed.observe.timing.step_clock import StepRow
from wellfed.ranks import Launch, gpu_label
from wellfed.record.entries import RankEntry
from wellfed.run.outcome import Outcome, RankEnded
from wellfed.run.ranks.rank_figures import RankFigures
from wellfed.units import gib
from wellfed.watch.cuda_in_use import reserved_peaks
from wellfed.watch.script_process import ScriptEnd

LATE_S = 5.0
"""Seconds that rank 0 waits at its end for ranks that have not ended."""
PATIENCE_S = 5.0
"""Seconds after which a call of the store is given up."""
_KEPT = 2_000
"""Number of latest steps of which a rank has figures."""
_NUMBERS = itertools.count()
"""Numbers of the watches of this process, alike on all ranks of a script."""


class TorchrunStore:
    """Latest figures of each rank, in the store that torchrun serves. It is left alone after a call that has failed.

    Every method raises a RankEnded then.
    """

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.problem: str | None = None
        """Reason why a call failed; None = none did."""
        self._address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])  # a script may change them
        self._prefix = f"wellfed watch/{next(_NUMBERS)}"
        self._store: Any = None

    def publish(self, kind: str, own: Any) -> None:
        """Leaves figures of this rank, in place of its previous ones."""
        self._ask("set", self._key(kind, self.launch.rank), pickle.dumps(own))

    def latest(self, kind: str) -> list[Any]:
        """Returns, on rank 0, the latest figures of each rank that has left some."""
        ranks = range(self.launch.world_size if self.launch.rank == 0 else 0)
        keys = [key for rank in ranks if self._ask("check", [key := self._key(kind, rank)])]
        return [pickle.loads(self._ask("get", key)) for key in keys]

    def gather(self, kind: str, own: Any) -> list[Any]:
        """Leaves figures of this rank. Returns, on rank 0, those of all ranks that leave some within `LATE_S`."""
        self.publish(kind, own)
        until_s = time.monotonic() + LATE_S
        while True:
            found = [one for one in self.latest(kind) if one is not None]  # None: of a rank that has begun again
            if self.launch.rank > 0 or len(found) == self.launch.world_size or time.monotonic() > until_s:
                return found
            time.sleep(0.05)

    def _key(self, kind: str, rank: int) -> str:
        return f"{self._prefix}/{kind}/{rank}"

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Returns what a call returns in a thread of its own, since a store may accept it and never answer."""
        answers = list[Any]()

        def ask() -> None:
            try:
                if self._store is None:
                    from torch.distributed import TCPStore  # type: ignore[attr-defined]

                    timeout = timedelta(seconds=PATIENCE_S)
                    self._store = TCPStore(*self._address, None, False, timeout, wait_for_workers=False)
                answers.append(getattr(self._store, method)(*arguments))
            except (RuntimeError, OSError) as error:
                self.problem = first_line(error)

        if self.problem is None:
            asking = threading.Thread(target=ask, name="wellfed-ranks", daemon=True)
            asking.start()
            asking.join(PATIENCE_S)
            if answers:
                return answers[0]
            self.problem = self.problem or f"no answer within {PATIENCE_S:g} s"
        raise RankEnded(Outcome("failed", EXIT_FAILED, "code", f"the store of torchrun failed: {self.problem}"))


class RankOfScript:
    """Figures of one rank of a script, which its steps fill. It writes no files; `ScriptRecord` of the first rank does.

    Args:
        origin_s: monotonic time of the script's start.
        store: where this rank leaves its figures; None = the script has one rank, or was not started by torchrun.
    """

    def __init__(self, *, origin_s: float, store: TorchrunStore | None) -> None:
        self.origin_s, self.store = origin_s, store
        self.is_open = False
        """Whether the training has begun."""
        self.seen_s = origin_s
        """Monotonic time of the latest sign of the training."""
        self.world_size = 1
        """Ranks that train together, as far as torch.distributed has shown."""
        self._latest_rows: deque[StepRow] = deque(maxlen=_KEPT)
        self._about: dict[str, Any] = {}
        self._figures: RankFigures | None = None
        self._known = set[int]()
        """Ranks whose latest figures rank 0 has recorded."""
        self._rss_before = peak_rss_bytes()
        self._peaks: dict[int, int] = {}
        """Most bytes that torch has reserved on each GPU. A script may reset torch's own figure at any time."""

    def begin(self) -> None:
        """Begins to measure, once."""
        if not self.is_open:
            self.is_open = True
            self._begin_figures()

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Records nothing: rank 0 does."""

    note = received = enter = checkpoint_begins = epochs = trained_with = data_parallel = show = _nothing

    def model(self, config: Mapping[str, Any], values: int) -> None:
        """Notes how many values the optimizer trains."""
        self._about["parameter_values"] = values

    def steps(self, rows: Sequence[StepRow], ranks: int = 1) -> bool:
        """Takes finished steps. Returns whether that has taken long, so that the time belongs to no step.

        Args:
            ranks: number of processes that train together.
        """
        self._latest_rows += rows
        self.world_size = max(self.world_size, ranks)  # at the end the group may be gone
        self._note_peaks()
        if self._figures is None or self.world_size == 1:  # scripts that train apart
            return False
        if self._about["gpu"] is None:
            self._note_gpu()
        return self._figures.stepped()

    def finish(self, end: ScriptEnd) -> Any:
        """Leaves the last figures of this rank for rank 0, which waits for them only if nothing has failed."""
        if self._figures is None:
            return
        self._note_gpu()
        self._known.clear()
        with suppress(RankEnded):
            if end.exit_code or self.world_size == 1:
                self._figures.report()
            else:
                self._figures.compare()
        known = {*self._known}
        self._figures.record_latest()
        self._known = known

    def peak_gib(self) -> float | None:
        """Returns the peak of memory: reserved by torch on the fullest GPU of this process, or on a CPU its growth.
        None if the script has an allocator of its own, which does not count it."""
        if (gpu := self.fullest_gpu()) is None:
            return gib(max(0.0, peak_rss_bytes() - self._rss_before))
        return gib(self._peaks[gpu]) if self._peaks[gpu] else None

    def fullest_gpu(self) -> int | None:
        """Returns the number of the GPU on which torch has held most memory in this process; None if on none."""
        self._note_peaks()
        peaks = self._peaks.copy()  # readings in another thread add to it
        return max(peaks, key=peaks.__getitem__, default=None)

    def _note_peaks(self) -> None:
        for gpu, peak in reserved_peaks().items():
            self._peaks[gpu] = max(peak, self._peaks.get(gpu, 0))

    def _rows(self) -> Rows:
        return self._latest_rows

    def _take_ranks(self, ranks: Sequence[RankEntry]) -> None:
        """Records the figures of ranks, on rank 0."""
        self._known = {one["rank"] for one in ranks}

    def _begin_figures(self) -> None:
        if self.store is None:
            return
        launch = self.store.launch
        self._about |= {"rank": launch.rank, "node": launch.node, "gpu": None}
        self._figures = RankFigures(
            self._about, self.store, rows=self._rows, peak_gib=self.peak_gib, record=self._take_ranks
        )

    def _note_gpu(self) -> None:
        gpu = self.fullest_gpu()
        assert self.store is not None
        if gpu is not None and torch.cuda.device_count() >= self.store.launch.devices:  # else each has its own numbers
            self._about["gpu"] = gpu_label(self._about["node"], gpu)


def unknown_ranks(world_size: int, known: Collection[int], store: TorchrunStore | None) -> str | None:
    """Returns which of the ranks that train together have not left their last figures, and why; None if all have."""
    missing = sorted({*range(1, world_size)} - {*known})
    if not missing:
        return None
    because = "they had not come by the end of rank 0"
    if store is None:
        because = "only torchrun's ranks leave them, in the store that it serves"
    elif store.problem is not None:
        because = f"the store of torchrun can't be used ({store.problem})"
    return f"The last figures of rank {', '.join(map(str, missing))} are unknown: {because}."
