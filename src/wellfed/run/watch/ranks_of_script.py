"""Brings the figures of a script's ranks to rank 0, beside the script's own process groups.

torchrun serves a store, at which the groups of its ranks meet. Each rank connects to it once more and leaves its
figures there. No rank waits for another one, except rank 0 at its end, for `LATE_S`.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from wellfed.batches import Delivery
from wellfed.errors import first_line
from wellfed.monitor.loop_watch import used_gpus
from wellfed.observe.hardware.detect import own_quota_cores
from wellfed.observe.telemetry.host import peak_rss_bytes
from wellfed.observe.timing.readiness import Rows
from wellfed.observe.timing.step_clock import StepRow
from wellfed.ranks import Launch, gpu_label
from wellfed.record.entries import RankEntry
from wellfed.run.ranks import store as stores
from wellfed.run.ranks.rank_figures import RankFigures
from wellfed.run.watch.script_process import ScriptEnd
from wellfed.units import gib

LATE_S = 5.0
"""Seconds that rank 0 waits at its end for ranks that have not ended."""
PATIENCE_S = 2.0
"""Seconds after which a call of the store is given up."""
_MOST_FAILURES = 3
_KEPT = 2_000
"""Number of latest steps of which a rank has figures."""
_NUMBERS = itertools.count()
"""Numbers of the watches of this process, alike on all ranks of a script."""


class TorchrunStore:
    """Latest figures of each rank, in the store that torchrun serves. It is left alone once `_MOST_FAILURES` calls in a
    row have failed."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.problem: str | None = None
        """Reason why its latest call failed; None = it did not."""
        self._failures = 0
        self._address = [os.environ["MASTER_ADDR"]], int(os.environ["MASTER_PORT"])  # a script may change them
        self._prefix = f"wellfed watch/{next(_NUMBERS)}"
        self._store: Any = None

    def publish(self, kind: str, own: Any) -> None:
        """Leaves figures of this rank, in place of its previous ones."""
        key, text = self._key(kind, self.launch.rank), json.dumps(own, default=float)

        def leave() -> None:
            self._call("set", key, text)
            self._call("check", [key])  # `set` gets no answer, so a store that is gone would not be noticed

        self._ask(leave)

    def latest(self, kind: str) -> list[Any]:
        """Returns, on rank 0, the latest figures of each rank that has left some."""
        if self.launch.rank > 0:
            return []
        keys = [self._key(kind, rank) for rank in range(self.launch.world_size)]
        return [json.loads(text) for text in self._ask(lambda: stores.contents(self._call, keys)) or ()]

    def gather(self, kind: str, own: Any) -> list[Any]:
        """Leaves figures of this rank. Returns, on rank 0, those of all ranks that leave some within `LATE_S`."""
        self.publish(kind, own)
        until_s = time.monotonic() + LATE_S
        while True:
            found = [one for one in self.latest(kind) if one is not None]  # None: of a rank that has begun again
            is_over = self.launch.rank > 0 or len(found) == self.launch.world_size or time.monotonic() > until_s
            if is_over or self.problem is not None:
                return found
            time.sleep(0.05)

    def _key(self, kind: str, rank: int) -> str:
        return f"{self._prefix}/{kind}/{rank}"

    def _call(self, method: str, *arguments: Any) -> Any:
        if self._store is None:
            self._store = stores.connect(self._address)
        return getattr(self._store, method)(*arguments)

    def _ask(self, call: Callable[[], Any]) -> Any:
        """Returns what a call returns in a thread of its own, since the store may hang; None if it can't be used."""
        if self._failures >= _MOST_FAILURES:
            return None
        answers, problems = list[Any](), list[str]()

        def ask() -> None:
            try:
                answers.append(call())
            except Exception as error:  # noqa: BLE001  the script is not ours to end
                problems.append(first_line(error))

        asking = threading.Thread(target=ask, name="wellfed-ranks", daemon=True)
        asking.start()
        asking.join(PATIENCE_S)
        if not answers:
            self._failures += 1
            self.problem = problems[0] if problems else f"it did not answer within {PATIENCE_S:g} s"
            return None
        self.problem, self._failures = None, 0
        return answers[0]


class RankOfScript:
    """Figures of one rank of a script, which its steps fill. It writes no files; `ScriptRecord` of the first rank does.

    Args:
        origin_s: monotonic time of the script's start.
        store: where this rank leaves its figures; None = the script has one rank, or was not started by torchrun.
    """

    def __init__(self, *, origin_s: float, store: TorchrunStore | None) -> None:
        self.origin_s, self.store = origin_s, store
        self.is_begun = self.is_open = False
        """Whether the training has begun, and can be recorded."""
        self.seen_s = origin_s
        """Monotonic time of the latest sign of the training."""
        self.world_size = 1
        """Ranks that train together, as far as torch.distributed has shown."""
        self._latest_rows: deque[StepRow] = deque(maxlen=_KEPT)
        self._about: dict[str, Any] = {}
        self._figures: RankFigures | None = None
        self._known, self._at_the_end = set[int](), set[int]()
        """Ranks whose figures rank 0 has, and those that have left their last ones."""
        self._rss_before = peak_rss_bytes()
        self._peaks: dict[int, int] = {}
        """Most bytes that torch has reserved on each GPU. A script may reset torch's own figure at any time."""

    def begin(self) -> None:
        """Begins to measure, once."""
        if not self.is_begun:
            self.is_begun = self.is_open = True
            self._begin_figures(own_quota_cores())

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Records nothing: rank 0 does."""

    note = enter = checkpoint_begins = epochs = trained_with = data_parallel = _nothing

    def model(self, config: Mapping[str, Any], tensors: int, values: int) -> None:
        """Notes the parameters that the optimizer has."""
        self._about["parameter_values"] = values

    def received(self, batch: Any, samples: int) -> None:
        """Counts a batch of training."""
        if self._figures is not None and (count := self._figures.on_batch) is not None:
            count(Delivery(batch, epoch=0, index=0, total=samples, num_samples=samples))

    def steps(self, rows: Sequence[StepRow], ranks: int = 1) -> bool:
        """Takes finished steps. Returns whether that has taken long, so that the time belongs to no step.

        Args:
            ranks: number of processes that train together.
        """
        self._latest_rows += rows
        return self._report(ranks)

    def start_again(self) -> None:
        """Drops the steps so far: they were no steps of training."""
        self._latest_rows.clear()
        if self._figures is not None:
            self._figures.begin()

    def finish(self, end: ScriptEnd) -> Any:
        """Leaves the last figures of this rank for rank 0, which waits for them only if nothing has failed."""
        if self._figures is not None:
            self._note_gpu()
            if end.exit_code or self.world_size == 1:
                self._figures.report()
            else:
                self._figures.compare()
            self._at_the_end = {*self._known}
            self._figures.record_latest()

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
        for gpu in used_gpus():
            before = self._peaks.setdefault(gpu, 0)
            with suppress(RuntimeError):  # an allocator of the script's own
                self._peaks[gpu] = max(before, torch.cuda.max_memory_reserved(gpu))

    def _rows(self) -> Rows:
        return self._latest_rows

    def _take_ranks(self, ranks: Sequence[RankEntry]) -> None:
        """Records the figures of ranks, on rank 0."""
        self._known = {one["rank"] for one in ranks}

    def _begin_figures(self, cpu_quota_cores: float) -> None:
        if self.store is None:
            return
        launch = self.store.launch
        self._about |= {"rank": launch.rank, "node": launch.node, "gpu": None, "cpu_quota_cores": cpu_quota_cores}
        self._figures = RankFigures(
            self._about, self.store, rows=self._rows, peak_gib=self.peak_gib, record=self._take_ranks
        )
        self._figures.begin()

    def _report(self, ranks: int) -> bool:
        """Leaves figures of this rank if that is due. Rank 0 reads those of all with its next steps. Returns whether
        rank 0 has recorded new ones."""
        self._note_peaks()
        self.world_size = max(self.world_size, ranks)
        if self._figures is None or self.world_size == 1:  # scripts that train apart
            return False
        if self._about["gpu"] is None:
            self._note_gpu()
        return self._figures.stepped()

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
