"""Makes steps of what a script does: batches, backward passes, steps of optimizers.

A step ends with an optimizer's step: of several optimizers, with that of the one that stepped last before the previous
batch. What comes after it belongs to the next step. Batches whose backward passes accumulate gradients are its
micro-batches, and each has a row of the clock of its own, which are joined.

Batches that are read while gradients are disabled, or that no backward pass follows, are a validation.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from wellfed.batches import BuildTime
from wellfed.explain.diagnosis.script_words import NO_LOADER, NO_STEP, OTHER_THREAD, OWN_STREAM
from wellfed.observe.timing.step_clock import BACKWARD, FORWARD, OPTIMIZER, WARMUP_STEPS, StepClock, StepRow
from wellfed.watch.cuda_in_use import device_clock, gpu_in_use, reserved_peaks
from wellfed.watch.error_guard import Harmless, harmless
from wellfed.watch.ranks_of_script import RankOfScript
from wellfed.watch.script_process import process_group
from wellfed.watch.script_record import SeenLoader, samples_in

SEVERAL_GPUS = "Several GPUs are used: steps are timed on GPU {} alone, and may end later on others."
_IDLE_S = 10.0
"""Seconds that the end of a script waits for the device, which does not end if it waits for a rank that has left."""
_COPIES_OF_VALIDATION = 3
"""Copies to the GPU without gradients, one after another, that are a validation in a loop without a DataLoader."""


@dataclass(slots=True)
class Iteration:
    """Work on one batch, or on several that are read ahead."""

    loader: SeenLoader | None = None
    """DataLoader of the batch; None without one."""
    samples: int = 1
    epoch: int = 0
    batches: int = 0
    """Batches that were read for it; 0 = it goes on with the batch of the one before."""
    largest: int = 0
    """Samples of the largest of these batches."""
    num_backward: int = 0
    optimizers: set[int] = field(default_factory=set)
    """Ids of the optimizers that have stepped within it."""


class ScriptSteps(Harmless):
    """Steps of one training thread, as marks on a `StepClock`. After an error of its own it does nothing.

    Args:
        needs_grad: whether batches that are asked for while gradients are disabled are a validation.
    """

    def __init__(self, record: RankOfScript, *, needs_grad: bool = True) -> None:
        self._record, self._needs_grad = record, needs_grad
        self.clock = StepClock(origin_s=record.origin_s, first_phase=FORWARD)
        self._gpu: int | None = None
        """GPU whose events time the steps; None = the host's clock does."""
        self._stream: Any = None
        """Stream of this GPU that trains."""
        self._is_recording: Callable[[], bool] = lambda: False
        """Returns whether a CUDA graph is being recorded, which must not hold our events."""
        self._thread, self._pid = threading.get_ident(), os.getpid()
        self._iteration: Iteration | None = None
        self._ended: Iteration | None = None
        """The latest that has ended."""
        self._asked_by: SeenLoader | None = None
        """DataLoader over which a pass has begun, so that the wait for its first batch is timed already."""
        self._joins = self._is_left_out = False
        """The batch that was asked for joins the open iteration; it belongs to no training."""
        self._aside: SeenLoader | None = None
        """DataLoader of such a batch, unless gradients were disabled. A backward pass shows that it trains."""
        self._ends_with: int | None = None
        """Id of the optimizer whose steps end a step of training; None before the first one."""
        self._stepped: int | None = None
        """Id of the optimizer that stepped last."""
        self._is_updating = False
        """An optimizer steps."""
        self._num_epochs = self._num_unseen_copies = 0
        """Passes over trained DataLoaders that have ended; copies without gradients since the last step."""
        self._rows: list[StepRow] = []
        """Rows of the step that has not ended."""
        self._step = self._num_ended = 0
        """Number of recorded steps, and of ended ones, of which a device may not have finished the latest."""
        self._saved_after = -1
        """Steps that had ended at the latest torch.save."""
        self.is_off = False
        """Nothing is marked any more."""

    def abandon(self) -> None:
        """Marks nothing more."""
        self.is_off = True

    # Batches

    @harmless
    def iterated(self, loader: SeenLoader) -> None:
        """Marks that a pass over a DataLoader begins, which may start workers."""
        if self._is_mine():
            loader.epoch += 1
            self._ask(loader)
            self._asked_by = loader

    @harmless
    def asked(self, loader: SeenLoader) -> None:
        """Marks that the next batch of a DataLoader is requested."""
        if self._asked_by is not loader and self._is_mine():
            self._ask(loader)

    def _ask(self, loader: SeenLoader) -> None:
        self._record.begin()
        open_, has_grad = self._iteration, torch.is_grad_enabled() or not self._needs_grad
        self._joins = False
        if open_ is not None and open_.optimizers:
            self._end(open_)  # late: the optimizer that ends a step is not known yet, or did not step
        elif open_ is not None and open_.num_backward:
            self._end(open_, is_whole=False)
        elif open_ is not None and open_.batches and open_.loader is not None and has_grad:
            if open_.loader.is_trained and open_.loader is loader:
                self._joins = True  # read ahead of the passes
                return
            if self._stepped is not None and not open_.loader.is_trained:
                open_.loader.is_aside = True
                self._pause()
        self._iteration = None
        self._ends_with = self._stepped
        self._is_left_out, self._aside = (
            loader.is_aside or not has_grad,
            loader if loader.is_aside and has_grad else None,
        )
        if self._is_left_out:
            self._pause()
            return
        self._record.enter("train")
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
        if self._is_left_out:
            return
        size, iteration = samples_in(batch, loader), self._iteration
        self.clock.got()
        if not self._joins or iteration is None:
            self._iteration = iteration = Iteration(loader, 0, loader.epoch)
        iteration.samples, iteration.batches = iteration.samples + size, iteration.batches + 1
        iteration.largest = max(iteration.largest, size)
        self._record.received(batch, size)
        self.clock.copy_begins(iteration.epoch, took)
        self.clock.copied()

    @harmless
    def exhausted(self, loader: SeenLoader) -> None:
        """Marks the end of a pass over a DataLoader. The time until the next belongs to no step."""
        if self._is_mine():
            self._asked_by = None
            if loader.is_trained and not self._is_left_out:
                self._num_epochs += 1
                self._record.epochs(self._num_epochs)
            self.clock.interrupt()

    # Passes

    @harmless
    def copying(self, *, is_done: bool) -> None:
        """Marks a copy from host to device."""
        iteration = self._iteration
        if self._gpu is None or iteration is None or iteration.num_backward or not self._is_mine():
            return
        if iteration.loader is None and not torch.is_grad_enabled():
            self._num_unseen_copies += is_done
            if self._num_unseen_copies >= _COPIES_OF_VALIDATION:
                self._iteration = None
                self._pause()
        elif torch.cuda.current_stream(self._gpu) == self._stream:
            self.clock.copies(is_done=is_done)
        else:
            self._record.note(OWN_STREAM)

    @harmless
    def backward(self, *, is_done: bool = False) -> None:
        """Marks begin or end of a backward pass."""
        if self._stepped is None and self._thread != threading.get_ident():
            self._thread, self._iteration = threading.get_ident(), None
            self._record.note(OTHER_THREAD)
        if not self._is_mine():
            return
        if is_done:
            self._mark(OPTIMIZER if self._is_updating else FORWARD)
            return
        iteration = self._iteration or self._begin_without_batch()
        iteration.num_backward += 1
        loader, self._aside = iteration.loader or self._aside, None
        if loader is not None and not loader.is_trained:
            loader.is_trained, loader.is_aside = True, False
            self._record.epochs(self._num_epochs)
        if self._gpu is not None:
            self._stream = torch.cuda.current_stream(self._gpu)  # batches may be read and copied on others
        self._mark(BACKWARD)

    @harmless
    def optimizer(self, optimizer: object, *, is_done: bool, has_closure: bool = False) -> None:
        """Marks begin or end of an optimizer's step, which may hold passes of a closure."""
        if not self._is_mine() or (is_done and not self._is_updating):  # a subclass's step calls super().step()
            return
        iteration, self._is_updating = self._iteration or self._begin_without_batch(), not is_done
        if not is_done:
            if id(optimizer) in iteration.optimizers and (self._ends_with is None or not iteration.batches):
                self._ends_with = id(optimizer)
                self._end(iteration)
                self._begin_without_batch()
            self._mark(FORWARD if has_closure else OPTIMIZER)
            return
        self._stepped = id(optimizer)
        iteration.optimizers.add(self._stepped)
        if self._stepped == self._ends_with:
            self._end(iteration)
            self._begin_without_batch()  # unless a batch comes first
        else:
            self._mark(FORWARD)

    @harmless
    def saving(self, *, is_done: bool) -> None:
        """Marks begin or end of writing a file with torch.save, whose time belongs to no step."""
        if self._num_ended == 0 or not self._is_mine():
            return
        if is_done:
            self._record.enter("train")
        else:  # model, optimizer and schedule may be several files of one checkpoint
            self._record.checkpoint_begins(is_more=self._saved_after == self._num_ended)
            self._saved_after = self._num_ended
        self.clock.interrupt()

    def _begin_without_batch(self) -> Iteration:
        """Begins an iteration with the batch of the one that has ended, or without a DataLoader."""
        self._record.begin()
        self._record.enter("train")
        self._use_events()
        ended = self._ended
        self._iteration = Iteration() if ended is None else Iteration(ended.loader, ended.samples, ended.epoch)
        if self._iteration.loader is None:
            self._record.note(NO_LOADER)
        self._num_unseen_copies = 0
        self.clock.ask()
        self.clock.got()
        self.clock.copy_begins(self._iteration.epoch)
        self.clock.copied()
        return self._iteration

    # Steps

    def _is_mine(self) -> bool:
        """Returns whether this thread is the one to watch, and no CUDA graph is being recorded in it."""
        if self.is_off or threading.get_ident() != self._thread or os.getpid() != self._pid or self._is_recording():
            return False
        self._record.seen_s = time.monotonic()
        return True

    def _end(self, iteration: Iteration, *, is_whole: bool = True) -> None:
        """Ends a step, or a part of one with its own batch."""
        self._iteration, self._ended = None, iteration
        self._num_ended += is_whole
        num_micro = max(1, min(iteration.batches, iteration.num_backward))
        micro_batch = (
            iteration.samples if num_micro == 1 else min(iteration.largest, -(-iteration.samples // num_micro))
        )
        is_due = self.clock.end(
            step=0, samples=iteration.samples, micro_batch=micro_batch, num_micro=num_micro * is_whole
        )
        if iteration.loader is not None:
            self._record.trained_with(iteration.loader, iteration.samples)
        if is_due or self._num_ended <= WARMUP_STEPS + 1:
            self._take()

    def _pause(self) -> None:
        self._record.enter("validate")
        self.clock.interrupt()

    def _take(self, *, wait: bool = False) -> None:
        """Passes on finished steps; with ``wait`` the device is idle, and all of them are finished."""
        found = []
        for row in self.clock.rows(wait=wait):
            self._rows.append(row)
            if row.num_micro:
                self._step += 1
                found.append(joined(self._rows, self._step))
                self._rows = []
        if found and self._record.steps(found, world_size()):
            self.clock.interrupt()

    def _use_events(self) -> None:
        """Times steps by events of the device from here on, once the script uses one."""
        if self._gpu is not None or self._num_ended > WARMUP_STEPS or self._iteration is not None:
            return
        self._gpu = gpu_in_use()
        if self._gpu is not None:
            self._take()
            if len(reserved_peaks()) > 1:
                self._record.note(SEVERAL_GPUS.format(self._gpu))
            with suppress(RuntimeError):  # a device without CUDA graphs
                torch.cuda.is_current_stream_capturing()
                self._is_recording = torch.cuda.is_current_stream_capturing
            self._stream = torch.cuda.current_stream(self._gpu)
            self.clock = device_clock(self._record.origin_s, self._gpu, lambda: self._stream, first_phase=FORWARD)

    def _mark(self, phase: int) -> None:
        self.clock.mark((phase, self.clock.now_s()))

    @harmless
    def finish(self, *, has_error: bool) -> None:
        """Ends the last step, and waits for the device to pass all steps; not after an error, which may hang."""
        if self.is_off:
            return
        self.is_off = True
        with suppress(RuntimeError) if has_error else nullcontext():  # of a device that has failed
            if self._iteration is not None and self._iteration.optimizers:
                self._end(self._iteration)
            stream = None if has_error or self._gpu is None else torch.cuda.current_stream(self._gpu)
            is_idle, until_s = not has_error, time.monotonic() + _IDLE_S
            while stream is not None and not (is_idle := stream.query()) and time.monotonic() < until_s:
                self._record.seen_s = time.monotonic()
                time.sleep(0.01)
            self._take(wait=is_idle)
        if not self._num_ended:
            self._record.note(NO_STEP)


def joined(rows: Sequence[StepRow], step: int) -> StepRow:
    """Returns the row of a step from the rows of its iterations."""
    last, warmup = rows[-1], step <= WARMUP_STEPS
    if len(rows) == 1:
        return last._replace(step=step, warmup=warmup)
    sums: dict[str, Any] = {}
    for name in StepRow._fields:
        if name.endswith("_ms") and name != "slowest_ms":
            known = [value for row in rows if (value := getattr(row, name)) is not None]
            sums[name] = sum(known) if known else None
    counts = {
        "samples": sum(row.samples for row in rows),
        "micro_batch": max(row.micro_batch for row in rows),
        "num_micro": sum(max(1, row.num_micro) for row in rows),
    }
    return last._replace(**sums, **counts, step=step, warmup=warmup)


def world_size() -> int:
    """Returns the number of ranks that train together."""
    group = process_group()
    return 1 if group is None else int(group.get_world_size())
