"""Makes steps of what a script does: batches, backward passes, steps of optimizers.

A *lap* is what follows one batch of a DataLoader up to the next batch. A step is one lap, or several if gradients are
accumulated. Laps without a backward pass are a validation. Without a DataLoader a lap begins with a forward pass.

Three levels: before any backward pass each batch counts as a step; then each lap with a backward pass; and from the
first step of an optimizer on, laps up to such a step. Steps of a lower level are dropped when a higher one is reached.
"""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from wellfed.batches import BuildTime, batch_size, bytes_by_dtype
from wellfed.monitor.error_guard import Harmless, harmless
from wellfed.monitor.loop_watch import cuda_events
from wellfed.observe.timing.step_clock import WARMUP_STEPS, StepClock, StepRow
from wellfed.run.watch.script_record import ScriptRecord, SeenLoader
from wellfed.train.step.synchronisation_search import SynchronisationSearch

FORWARD, BACKWARD, OPTIMIZER, OTHER = range(4)
"""Phases of a step, as the clock numbers them."""
OTHER_THREAD = (
    "Batches are read in another thread than the one that trains. The wait for them counts as time between steps."
)
NO_LOADER = "No DataLoader was iterated: making batches counts as time between steps, or as part of them."
GRAPHS = "Steps replay CUDA graphs: what happens within one is not told apart."
_FEWEST_OF_VALIDATION = 3
"""Forward passes without gradients, one after another, that are a validation. Fewer may be a teacher's of this step."""


class Level(IntEnum):
    """What has been seen of the training so far."""

    batches, backward, optimizer = range(3)


@dataclass(slots=True)
class Lap:
    """What follows one batch."""

    loader: SeenLoader | None
    """DataLoader of the batch; None without one."""
    samples: int = 1
    epoch: int = 0
    took: BuildTime | None = None
    num_steps: int = 0
    """Steps of optimizers so far."""
    has_backward: bool = False
    has_replay: bool = False
    has_copy: bool = False
    is_copied: bool = False
    """Forward or backward has begun, so that later copies are part of them."""
    is_ended: bool = False


class ScriptSteps(Harmless):
    """Steps of one training thread, as marks on a `StepClock`. After an error of its own it does nothing."""

    def __init__(self, record: ScriptRecord) -> None:
        super().__init__(quiet=True)
        self._record = record
        self.clock = StepClock(origin_s=record.origin_s)
        self._has_events = False
        self._is_recording: Callable[[], bool] = lambda: False
        """Returns whether a CUDA graph is being recorded, which must not hold our events."""
        self.level = Level.batches
        self.step, self._ranks = 0, 1
        self._thread: int | None = None
        """Thread that trains, or the first that reads batches."""
        self._lap: Lap | None = None
        self._asked_by: SeenLoader | None = None
        """DataLoader whose iteration has begun, so that the wait for its first batch is timed already."""
        self._joins = self._is_aside = False
        """The next batch joins the open lap; it belongs to no training."""
        self._trained: WeakSet[SeenLoader] = WeakSet()
        """DataLoaders whose batches were followed by a backward pass."""
        self._feeds: SeenLoader | None = None
        """The latest of them."""
        self._aside: WeakSet[SeenLoader] = WeakSet()
        """DataLoaders whose batches were not."""
        self._epochs: WeakKeyDictionary[SeenLoader, int] = WeakKeyDictionary()
        self._steps_of_lap = 1
        """Steps of optimizers in the latest lap that had any."""
        self._is_in_optimizer = False
        self._num_without_grad = 0
        """Forward passes without gradients since the last step, in a loop without a DataLoader."""
        self._search: SynchronisationSearch | None = None
        """Search for lines that wait for the device, in the first steps of an optimizer."""
        self._group: list[StepRow] = []
        self._num_ended = self._num_taken = self._num_dropped = 0
        """Laps that ended, whose rows were taken, and whose rows are dropped."""
        self.is_off = False

    def abandon(self) -> None:
        """Marks nothing more."""
        self.is_off = True
        if self._search is not None:
            self._search.close()

    # Batches

    @harmless
    def iterated(self, loader: SeenLoader) -> None:
        """Marks that an iteration over a DataLoader begins, which may start workers."""
        if self._is_mine():
            self._epochs[loader] = self._epochs.get(loader, -1) + 1
            self._ask(loader)
            self._asked_by = loader

    @harmless
    def asked(self, loader: SeenLoader) -> None:
        """Marks that the next batch of a DataLoader is requested."""
        if self._is_mine() and self._asked_by is not loader:
            self._ask(loader)

    def _ask(self, loader: SeenLoader) -> None:
        self._record.begin()
        self._joins = self._is_aside = False
        lap = self._lap
        if lap is not None:
            is_unused = not (lap.is_ended or lap.has_backward or lap.loader is None)
            if is_unused and self.level > Level.batches and torch.is_grad_enabled():
                # Several loaders, as in zip(a, b), or batches that are read ahead.
                others = lap.loader not in self._aside
                self._joins = loader in self._trained if lap.loader is loader else others
            if not self._joins:
                self._close(lap)
        if self.level > Level.batches and (loader in self._aside or not torch.is_grad_enabled()):
            self._is_aside = True
            self._pause()
        elif not self._joins:
            if loader in self._trained or self.level == Level.batches:
                self._resume()
            self._use_events()
            self.clock.ask()

    @harmless
    def got(self, loader: SeenLoader, batch: Any, took: BuildTime | None) -> None:
        """Marks that a batch is there.

        Args:
            took: time to build it in this process; None = a worker did.
        """
        if not self._is_mine():
            return
        self._asked_by = None
        if self._is_aside:
            return
        self.clock.got()
        size, lap = _size(batch, loader), self._lap
        if not self._joins or lap is None:
            self._lap = lap = Lap(loader, size, self._epochs.get(loader, 0), took)
            if not self._record.has_batch:
                self._record.batch(bytes_by_dtype(batch))
        elif lap.loader is loader:
            lap.samples += size
        self.clock.copy_begins(lap.epoch, lap.took)
        self.clock.copied()

    @harmless
    def exhausted(self, loader: SeenLoader) -> None:
        """Marks the end of an iteration. The time until the next belongs to no step."""
        if self._is_mine():
            self._asked_by = None
            self.clock.interrupt()

    # Passes

    @harmless
    def copying(self, *, is_done: bool) -> None:
        """Marks a copy from host to device."""
        lap = self._lap
        if not self._is_mine() or lap is None or lap.is_copied or lap.is_ended:
            return
        if is_done:
            lap.has_copy = True
            self.clock.copied()
        elif not lap.has_copy:  # what the script did with the batch before is no copy
            self.clock.copy_begins(lap.epoch, lap.took)

    @harmless
    def forward(self, *, is_done: bool = False) -> None:
        """Marks begin or end of the outermost module's forward pass."""
        if not self._is_mine() or self._is_aside:
            return
        lap = self._lap
        is_between = lap is None or (lap.loader is None and lap.is_ended)
        if not torch.is_grad_enabled():
            self._num_without_grad += is_between and not is_done
            if self._num_without_grad == _FEWEST_OF_VALIDATION and is_between:
                self._pause()
            return
        self._num_without_grad = 0
        if is_between and not is_done:
            if lap is not None:
                self._close(lap)
            lap = self._begin_without_loader()
        if lap is not None and not lap.is_copied:
            lap.is_copied = True
            if not lap.has_copy:
                self.clock.copied()
        self._mark(OTHER if is_done else FORWARD)

    @harmless
    def backward(self, *, is_done: bool = False) -> None:
        """Marks begin or end of a backward pass."""
        if self.level == Level.batches and self._thread not in (None, threading.get_ident()):
            self._thread, self._lap = threading.get_ident(), None
            self._record.note(OTHER_THREAD)
        if not self._is_mine():
            return
        if is_done:
            self._mark(OPTIMIZER if self._is_in_optimizer else OTHER)
            return
        lap = self._training_lap()
        lap.has_backward = lap.is_copied = True
        self._raise_to(Level.backward)
        if lap.loader is not None and lap.loader is not self._feeds:
            self._feeds = lap.loader
            self._trained.add(lap.loader)
        self._resume()
        self._mark(BACKWARD)

    @harmless
    def optimizer(self, *, is_done: bool) -> None:
        """Marks begin or end of an optimizer's step."""
        if not self._is_mine():
            return
        self._is_in_optimizer = not is_done
        if not is_done:
            self._mark(OPTIMIZER)
            return
        lap = self._training_lap()
        lap.num_steps += 1
        lap.is_copied = True
        self._mark(OTHER)
        self._raise_to(Level.optimizer)
        if lap.num_steps >= self._steps_of_lap and not lap.is_ended:
            self._end(lap)

    @harmless
    def replayed(self) -> None:
        """Marks that a CUDA graph was replayed, which may hold a whole step."""
        if self._is_mine() and self._lap is not None and not self._lap.is_ended:
            self._lap.has_replay = True
            self._record.note(GRAPHS)

    @harmless
    def saving(self, *, is_done: bool) -> None:
        """Marks begin or end of writing a file with torch.save, whose time belongs to no step."""
        if not self._is_mine() or self.step == 0:
            return
        if self._lap is not None and self._lap.num_steps and not self._lap.is_ended:
            self._end(self._lap)
        if is_done:
            self._record.checkpoint_ends()
        else:
            self._record.checkpoint_begins()
        self.clock.interrupt()

    def _training_lap(self) -> Lap:
        return self._begin_without_loader() if self._lap is None else self._lap

    def _begin_without_loader(self) -> Lap:
        self._record.begin()
        if not self._trained:
            self._record.note(NO_LOADER)
        self._resume()
        self._use_events()
        self.clock.ask()
        self.clock.got()
        self.clock.copy_begins(0)
        self.clock.copied()
        self._lap = Lap(None, samples=0 if self._trained else 1, is_copied=True)
        return self._lap

    # Laps

    def _is_mine(self) -> bool:
        """Returns whether this thread is the one to watch, and no CUDA graph is being recorded in it."""
        if self.is_off:
            return False
        here = threading.get_ident()
        if self._thread is None:
            self._thread = here
        if not self._record.is_begun and multiprocessing.parent_process() is not None:
            self.is_off = True  # a process of the script's own, beside others
            return False
        return here == self._thread and not self._is_recording()

    def _raise_to(self, level: Level) -> None:
        """Drops the steps of a lower level, once more is seen of the training."""
        if level > self.level:
            self.level = level
            self._group.clear()
            self._num_dropped = self._num_ended
            if self.step:
                self.step = 0
                self._record.start_again()

    def _close(self, lap: Lap) -> None:
        """Ends a lap with the request of the next batch."""
        self._lap = None
        if lap.num_steps:
            self._steps_of_lap = lap.num_steps
        if lap.is_ended:
            return
        if lap.num_steps or lap.has_backward or lap.has_replay or self.level == Level.batches:
            self._end(lap)
        elif lap.loader is not None:
            self._aside.add(lap.loader)
            self._pause()

    def _end(self, lap: Lap) -> None:
        lap.is_ended = True
        self._num_ended += 1
        is_whole = lap.num_steps > 0 or lap.has_replay or self.level < Level.optimizer
        is_due = self.clock.end(step=0, samples=lap.samples, micro_batch=lap.samples, num_micro=int(is_whole))
        if lap.loader is not None:
            self._record.trained_with(lap.loader, lap.samples)
        if self._search is not None and self.level == Level.optimizer and is_whole:
            self._search.step_ended()
        if is_due or self._num_ended <= WARMUP_STEPS + 1:
            self._take(self.clock.rows())

    def _pause(self) -> None:
        if self._search is not None:
            self._search.pause()
        self._record.enter("validate")
        self.clock.interrupt()

    def _resume(self) -> None:
        if self._search is not None:
            self._search.go_on()
        self._record.enter("train")

    def _take(self, rows: Sequence[StepRow]) -> None:
        """Passes on finished steps, each made of the rows of its laps."""
        found = []
        for row in rows:
            self._num_taken += 1
            if self._num_taken <= self._num_dropped:
                continue
            self._group.append(row)
            if row.num_micro:
                self.step += 1
                found.append(_joined(self._group, self.step))
                self._group = []
        if found:
            self._ranks = max(self._ranks, world_size())  # at the end the group may be gone
            self._record.steps(found, self._ranks)

    def _use_events(self) -> None:
        """Times steps by events of the device from here on, once the script uses one."""
        if self._has_events or self.step > WARMUP_STEPS or self._lap is not None:
            return
        new_event = cuda_events()
        if new_event is not None:
            self._take(self.clock.rows())
            self._has_events = True
            with suppress(RuntimeError):  # a device without CUDA graphs
                torch.cuda.is_current_stream_capturing()
                self._is_recording = torch.cuda.is_current_stream_capturing
            self._search = SynchronisationSearch(self._record.synchronised)
            self.clock = StepClock(origin_s=self._record.origin_s, new_event=new_event)

    def _mark(self, phase: int) -> None:
        mark: Callable[[tuple[int, float]], None] | None = getattr(self.clock, "mark", None)
        if mark is not None and self._lap is not None and not self._lap.is_ended:
            mark((phase, time.monotonic()))

    @harmless
    def finish(self) -> None:
        """Ends the last lap, and waits for the device to pass all steps."""
        if self.is_off:
            return
        if self._lap is not None:
            self._close(self._lap)
        self.abandon()
        if self._has_events:
            torch.cuda.synchronize()
        self._take(self.clock.rows(wait=True))


def _joined(rows: Sequence[StepRow], step: int) -> StepRow:
    """Returns the row of a step from the rows of its laps."""
    last, warmup = rows[-1], step <= WARMUP_STEPS
    if len(rows) == 1:
        return last._replace(step=step, warmup=warmup)
    sums: dict[str, Any] = {}
    for name in StepRow._fields:
        if name.endswith("_ms") and name != "slowest_ms":
            known = [value for row in rows if (value := getattr(row, name)) is not None]
            sums[name] = sum(known) if known else None
    samples = sum(row.samples for row in rows)
    micro_batch = max(row.micro_batch for row in rows)
    return last._replace(
        **sums, step=step, samples=samples, micro_batch=micro_batch, num_micro=len(rows), warmup=warmup
    )


def _size(batch: Any, loader: SeenLoader) -> int:
    """Returns the samples of a batch; by the DataLoader's setting if the batch does not show them."""
    first = batch[0] if type(batch) in (list, tuple) and batch else batch
    if type(first) is torch.Tensor and first.ndim:  # without a visit to each tensor
        return len(first)
    try:
        return batch_size(batch)
    except Exception:  # noqa: BLE001  a batch of any type
        return loader.batch_size if isinstance(loader.batch_size, int) else 1


def world_size() -> int:
    """Returns the number of ranks that train together."""
    distributed = sys.modules.get("torch.distributed")
    is_one_of_many = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return int(distributed.get_world_size()) if is_one_of_many and distributed is not None else 1
