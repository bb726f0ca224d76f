"""Makes steps of what a script does: batches, backward passes, steps of optimizers.

An *iteration* is what follows one batch of a DataLoader up to the next. A step is one iteration, or several if
gradients are accumulated. Iterations without a backward pass are a validation. Without a DataLoader, an iteration
begins with a forward pass. Passes after the end of an iteration, as of a GAN that trains one of its models more often,
are part of the next step. Another step of the same optimizer with the same batch is a step of its own.

Until an optimizer steps, each batch counts as a step. Its first step drops these.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from wellfed.batches import BuildTime, batch_size
from wellfed.explain.diagnosis.script_words import NO_LOADER, OTHER_THREAD, OWN_STREAM
from wellfed.monitor.error_guard import Harmless, harmless
from wellfed.monitor.loop_watch import device_clock, gpu_in_use, used_gpus
from wellfed.observe.timing.step_clock import BACKWARD, FORWARD, OPTIMIZER, OTHER, WARMUP_STEPS, StepClock
from wellfed.run.watch.ranks_of_script import RankOfScript
from wellfed.run.watch.rows_of_steps import RowsOfSteps
from wellfed.run.watch.script_process import process_group
from wellfed.run.watch.script_record import SeenLoader

SEVERAL_GPUS = "Several GPUs are used: steps are timed on GPU {} alone, and may end later on others."
GRAPHS = "Steps replay CUDA graphs: what happens within one is not told apart."
_IDLE_S = 10.0
"""Seconds that the end of a script waits for the device, which does not end if it waits for a rank that has left."""
_FEWEST_OF_VALIDATION = 3
"""Forward passes without gradients, one after another, that are a validation. Fewer may be a teacher's of this step."""


@dataclass(slots=True)
class Iteration:
    """Work on one batch."""

    loader: SeenLoader | None
    """DataLoader of the batch; None without one."""
    samples: int = 1
    epoch: int = 0
    took: BuildTime | None = None
    batches: int = 1
    """Batches of its loader: several if they are read ahead of the passes."""
    largest: int = 0
    """Samples of the largest of these batches."""
    num_backward: int = 0
    optimizers: set[int] = field(default_factory=set)
    """Ids of the optimizers that have stepped with this batch."""
    has_pass: bool = False
    """A pass of any model has begun, so that later copies are part of it."""
    has_replay: bool = False
    is_more: bool = False
    """It follows an ended one with the same batch. Its time is part of the next step."""
    is_ended: bool = False
    copied_on: Any = None
    """Another stream than the one that trained before, on which its batch, or the next one, was copied."""

    @property
    def is_unused(self) -> bool:
        """Whether nothing was done with the batch yet."""
        return not (self.is_ended or self.has_pass or self.has_replay)


class ScriptSteps(Harmless):
    """Steps of one training thread, as marks on a `StepClock`. After an error of its own it does nothing.

    Args:
        parent: process that had started this one when the watch began. Processes that the script starts have another.
    """

    def __init__(self, record: RankOfScript, parent: object) -> None:
        self._record, self._parent = record, parent
        self.clock = StepClock(origin_s=record.origin_s)
        self._gpu: int | None = None
        """GPU whose events time the steps; None = the host's clock does."""
        self._stream: Any = None
        """Stream of this GPU that trains."""
        self._is_recording: Callable[[], bool] = lambda: False
        """Returns whether a CUDA graph is being recorded, which must not hold our events."""
        self._has_optimizer = False
        """An optimizer has stepped."""
        self._ranks = 1
        self._thread: int | None = None
        """Thread that trains, or the first that reads batches."""
        self._iteration: Iteration | None = None
        self._asked_by: SeenLoader | None = None
        """DataLoader over which a pass has begun, so that the wait for its first batch is timed already."""
        self._joins = self._is_aside = False
        """The next batch joins the open iteration; it belongs to no training."""
        self._aside: SeenLoader | None = None
        """DataLoader whose batches are left out at present."""
        self._has_loader = False
        """A DataLoader is trained with."""
        self._sees_passes = self._is_updating = False
        """A forward pass was seen; an optimizer steps."""
        self._num_epochs = 0
        """Passes over trained DataLoaders that have ended."""
        self._num_without_grad = 0
        """Forward passes without gradients since the last step, in a loop without a DataLoader."""
        self._rows = RowsOfSteps()
        self._saved_after = -1
        """Iterations that had ended at the latest torch.save."""
        self.is_off = self.has_untrained = False
        """Nothing is marked; there is a model that no optimizer trains, whose passes are not seen."""

    def abandon(self) -> None:
        """Marks nothing more."""
        self.is_off = True

    # Batches

    @harmless
    def iterated(self, loader: SeenLoader) -> None:
        """Marks that a pass over a DataLoader begins, which may start workers."""
        if self._is_mine():
            loader.epoch += 1
            loader.is_fed = False
            self._ask(loader)
            self._asked_by = loader

    @harmless
    def asked(self, loader: SeenLoader) -> None:
        """Marks that the next batch of a DataLoader is requested."""
        if self._is_mine() and self._asked_by is not loader:
            self._ask(loader)

    def _ask(self, loader: SeenLoader) -> None:
        self._record.begin()
        before, is_trained, has_grad = self._iteration, loader.is_trained, torch.is_grad_enabled()
        self._joins = self._is_aside = False
        if self._has_optimizer and has_grad and before is not None and before.is_unused:
            if is_trained and (before.loader is loader or self._sees_passes):
                self._joins = True
                return
            if before.loader is not None and before.loader.is_trained and not is_trained:
                self._is_aside = True  # a batch of another loader that is looked at
                return
        if before is not None:
            self._close(before)
        if self._has_optimizer and (loader.is_aside or not has_grad):
            self._is_aside, self._aside = True, loader
            self._pause()
            return
        if is_trained or not self._has_optimizer:
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
        if self._is_aside:
            self._is_aside = self._iteration is None
            return
        size, iteration = _size(batch, loader), self._iteration
        self.clock.got()
        if self._joins and iteration is not None and iteration.loader is loader:
            iteration.samples, iteration.batches = iteration.samples + size, iteration.batches + 1
            iteration.largest = max(iteration.largest, size)
        else:
            self._iteration = iteration = Iteration(loader, size, loader.epoch, took, largest=size)
        self._record.received(batch, size)
        self.clock.copy_begins(iteration.epoch, iteration.took)
        self.clock.copied()

    @harmless
    def exhausted(self, loader: SeenLoader) -> None:
        """Marks the end of a pass over a DataLoader. The time until the next belongs to no step."""
        if self._is_mine():
            self._asked_by, self._is_aside = None, False
            if loader.is_fed and loader.is_trained:
                self._num_epochs += 1
                self._record.epochs(self._num_epochs)
            self.clock.interrupt()

    # Passes

    @harmless
    def copying(self, *, is_done: bool) -> None:
        """Marks a copy from host to device. One after the end of an iteration is part of the next, as Accelerate copies
        a batch before it asks for another; it is no sign that the training goes on."""
        iteration = self._iteration
        if iteration is None or threading.get_ident() != self._thread or self._is_recording():
            return
        if iteration.has_pass and not iteration.is_ended:
            return
        stream = None if self._gpu is None else torch.cuda.current_stream(self._gpu)
        if stream == self._stream:
            self.clock.copies(is_done=is_done)
        elif is_done and not iteration.is_ended:
            iteration.copied_on = stream

    @harmless
    def forward(self, *, is_done: bool = False) -> None:
        """Marks begin or end of an outermost module's forward pass."""
        if not self._is_mine():
            return
        self._sees_passes = True
        if self._is_aside:
            return
        iteration = self._iteration
        if torch.is_grad_enabled():
            self._num_without_grad = 0
            if not is_done and (iteration is None or iteration.is_ended):
                self._begin_without_loader()
        elif iteration is None or (iteration.loader is None and iteration.is_ended):
            self._num_without_grad += not is_done
            if self._num_without_grad == _FEWEST_OF_VALIDATION:
                self._pause()
        self._mark_pass(FORWARD, is_done=is_done)

    def _mark_pass(self, phase: int, *, is_done: bool) -> None:
        """Marks begin or end of a pass within the open iteration. What comes before its first forward pass is no
        compute, unless another model may have run then."""
        iteration = self._iteration
        if iteration is None or iteration.is_ended:
            return
        if not iteration.has_pass and phase == FORWARD and not (self.has_untrained or self.clock.has_copies):
            self.clock.copied()
        iteration.has_pass = True
        after = OPTIMIZER if self._is_updating and phase == BACKWARD else OTHER
        self._mark(after if is_done else phase)

    @harmless
    def backward(self, *, is_done: bool = False) -> None:
        """Marks begin or end of a backward pass."""
        if not self._has_optimizer and self._thread not in (None, threading.get_ident()):
            self._thread, self._iteration = threading.get_ident(), None
            self._record.note(OTHER_THREAD)
        if not self._is_mine():
            return
        if not is_done:
            iteration = self._iteration
            if iteration is None or iteration.is_ended:
                iteration = self._begin_without_loader()
            iteration.num_backward += 1
            if iteration.loader is not None and not iteration.loader.is_trained:
                self._has_loader = iteration.loader.is_trained = True
                self._record.epochs(self._num_epochs)
            self._record.enter("train")
            self._use_stream()
        self._mark_pass(BACKWARD, is_done=is_done)

    @harmless
    def optimizer(self, optimizer: object, *, is_done: bool, has_closure: bool = False) -> None:
        """Marks begin or end of an optimizer's step, which may hold passes of a closure."""
        if not self._is_mine():
            return
        if is_done and not self._is_updating:  # a step that holds another one, as a subclass's calls super().step()
            return
        self._is_updating = not is_done
        iteration = self._iteration
        if iteration is None or iteration.is_ended:
            iteration = self._begin_without_loader()
        if not is_done:
            self._mark(OTHER if has_closure else OPTIMIZER)
            return
        if iteration.is_more and id(optimizer) in iteration.optimizers:  # another step with the same batch
            iteration.is_more, iteration.optimizers = False, set()
        iteration.optimizers.add(id(optimizer))
        self._mark(OTHER)
        if not self._has_optimizer:
            self._has_optimizer = True
            if self._rows.start_again():
                self._record.start_again()
        self._end(iteration)

    @harmless
    def replaying(self, *, is_done: bool) -> None:
        """Marks begin or end of the replay of a CUDA graph, which may hold a whole step. Code of torch.compile disables
        gradients before it replays one, since the graph holds a single pass."""
        if not is_done and self._is_mine() and self._iteration is not None and not self._iteration.is_ended:
            self._iteration.has_replay |= torch.is_grad_enabled()
            self._record.note(GRAPHS)
            self._use_stream()

    @harmless
    def saving(self, *, is_done: bool) -> None:
        """Marks begin or end of writing a file with torch.save, whose time belongs to no step."""
        if not self._is_mine() or self._rows.step == 0:
            return
        if is_done:
            self._record.enter("train")
        else:  # model, optimizer and schedule may be several files of one checkpoint
            self._record.checkpoint_begins(is_more=self._saved_after == self._rows.num_ended)
            self._saved_after = self._rows.num_ended
        self.clock.interrupt()

    def _begin_without_loader(self) -> Iteration:
        """Begins an iteration with a pass: without a DataLoader, or with the batch of one that has ended."""
        ended, self._is_aside = self._iteration, False
        self._iteration = None
        self._record.begin()
        if self._aside is not None:
            self._aside.is_aside = False
        if not self._has_loader:
            self._record.note(NO_LOADER)
        self._record.enter("train")
        self._use_events()
        self.clock.ask()
        self.clock.got()
        self.clock.copy_begins(0 if ended is None else ended.epoch)
        self.clock.copied()
        if ended is not None and ended.loader is not None:
            of = ended.loader, ended.samples, ended.epoch
            begun = Iteration(*of, has_pass=True, optimizers=ended.optimizers, is_more=True)
        else:
            begun = Iteration(None, samples=0 if self._has_loader else 1, has_pass=True)
        self._iteration = begun
        return begun

    # Iterations and their steps

    def _is_mine(self) -> bool:
        """Returns whether this thread is the one to watch, and no CUDA graph is being recorded in it."""
        if self.is_off:
            return False
        here = threading.get_ident()
        if self._thread is None:
            self._thread = here
        if not self._record.is_begun and multiprocessing.parent_process() is not self._parent:
            self.is_off = True  # a process of the script's own, beside others
            return False
        if here != self._thread or self._is_recording():
            return False
        self._record.seen_s = time.monotonic()
        return True

    def _close(self, iteration: Iteration) -> None:
        """Ends an iteration with the request of the next batch."""
        self._iteration = None
        if iteration.is_ended:
            return
        if iteration.num_backward or iteration.has_replay or not self._has_optimizer:
            self._end(iteration)
        elif iteration.loader is not None:
            is_used = iteration.has_pass or not self._sees_passes  # else looked at, or read by a model that is not seen
            iteration.loader.is_aside |= is_used and not iteration.loader.is_trained
            self._pause()

    def _end(self, iteration: Iteration) -> None:
        iteration.is_ended = True
        self._rows.num_ended += 1
        if iteration.copied_on is not None and iteration.copied_on != self._stream:
            self._record.note(OWN_STREAM)
        is_whole = bool(iteration.optimizers) or iteration.has_replay or not self._has_optimizer
        is_whole, samples = is_whole and not iteration.is_more, 0 if iteration.is_more else iteration.samples
        if iteration.loader is not None and iteration.loader.is_dispatched:
            samples = -(-samples // world_size())  # of this rank; a share that is smaller is filled up
        num_micro = max(1, min(iteration.batches, iteration.num_backward))
        micro_batch = samples if num_micro == 1 else min(iteration.largest, -(-samples // num_micro))
        is_due = self.clock.end(step=0, samples=samples, micro_batch=micro_batch, num_micro=num_micro * is_whole)
        if iteration.loader is not None:
            iteration.loader.is_fed = True
            self._record.trained_with(iteration.loader, samples)
        if is_due or self._rows.num_ended <= WARMUP_STEPS + 1:
            self._take()

    def _pause(self) -> None:
        self._record.enter("validate")
        self.clock.interrupt()

    def _take(self, *, wait: bool = False) -> None:
        """Passes on finished steps; with ``wait`` the device is idle, and all of them are finished."""
        if found := self._rows.joined(self.clock.rows(wait=wait)):
            self._ranks = max(self._ranks, world_size())  # at the end the group may be gone
            if self._record.steps(found, self._ranks):
                self.clock.interrupt()

    def _use_events(self) -> None:
        """Times steps by events of the device from here on, once the script uses one."""
        if self._gpu is not None or self._rows.step > WARMUP_STEPS or self._iteration is not None:
            return
        self._gpu = gpu_in_use()
        if self._gpu is not None:
            self._take()
            if len(used_gpus()) > 1:
                self._record.note(SEVERAL_GPUS.format(self._gpu))
            with suppress(RuntimeError):  # a device without CUDA graphs
                torch.cuda.is_current_stream_capturing()
                self._is_recording = torch.cuda.is_current_stream_capturing
            self._use_stream()
            self.clock = device_clock(self._record.origin_s, self._gpu, lambda: self._stream)

    def _use_stream(self) -> None:
        """Times further steps by events on the current stream. Batches may be read and copied on others."""
        if self._gpu is not None:
            self._stream = torch.cuda.current_stream(self._gpu)

    def _mark(self, phase: int) -> None:
        if self._iteration is not None and not self._iteration.is_ended:
            self.clock.mark((phase, self.clock.now_s()))

    @harmless
    def finish(self, *, has_error: bool) -> None:
        """Ends the last iteration, and waits for the device to pass all steps; not after an error, which may hang."""
        if self.is_off:
            return
        self.is_off = True
        with suppress(RuntimeError) if has_error else nullcontext():  # of a device that has failed
            if self._iteration is not None:
                self._close(self._iteration)
            stream = None if has_error or self._gpu is None else torch.cuda.current_stream(self._gpu)
            is_idle, until_s = not has_error, time.monotonic() + _IDLE_S
            while stream is not None and not (is_idle := stream.query()) and time.monotonic() < until_s:
                self._record.seen_s = time.monotonic()
                time.sleep(0.01)
            self._take(wait=is_idle)


def _size(batch: Any, loader: SeenLoader) -> int:
    """Returns the samples of a batch; by the DataLoader's setting if the batch does not show them."""
    first = batch[0] if type(batch) in (list, tuple) and batch else batch
    if type(first) is torch.Tensor and first.ndim:  # without a visit to each tensor
        size, shape = loader.batch_size, first.shape
        return size if isinstance(size, int) and shape[0] > size else shape[0]  # sequences as [time, batch]
    try:
        return batch_size(batch)
    except Exception:  # noqa: BLE001  a batch of any type
        return loader.batch_size if isinstance(loader.batch_size, int) else 1


def world_size() -> int:
    """Returns the number of ranks that train together."""
    group = process_group()
    return 1 if group is None else int(group.get_world_size())
