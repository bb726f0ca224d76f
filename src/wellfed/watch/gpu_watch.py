"""Watches GPUs and host beside a training loop of any framework, and times its steps."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from types import TracebackType
from typing import Generic, Self, TypeVar

import torch

from wellfed.batches import BuildTime
from wellfed.observe.timing.step_clock import WARMUP_STEPS, StepClock
from wellfed.ranks import own_rank
from wellfed.watch.cuda_in_use import device_clock, gpu_in_use
from wellfed.watch.error_guard import harmless
from wellfed.watch.loop_watch import LoopWatch
from wellfed.watch.script_process import ScriptEnd
from wellfed.watch.script_record import ScriptRecord, SeenLoader, samples_in

Batch = TypeVar("Batch")
NO_BATCH = "No batch came through watch.batches(loader) in this block, so no step was timed."


class GPUWatch(LoopWatch):
    """Reads GPUs and host during the ``with`` block, times the steps of `batches`, and leaves a run folder.

    A step is the body of the loop over `batches`, plus the wait for its batch. Where torch uses CUDA, events on the
    device time the steps without synchronising. Otherwise the host's clock does. Errors in here are logged once and do
    not affect training. Of several processes of a training the first one watches.
    """

    _is_open = False
    _pass: object | None = None
    """Loop over `batches` that goes on."""

    def __enter__(self) -> Self:
        self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(error)

    def batches(self, loader: Iterable[Batch]) -> Iterable[Batch]:
        """Returns the loader's batches, each as a step: ``for x, y in watch.batches(loader):``. Use it for training
        only, and for one loop at a time. Time between two such loops (validation, checkpoints) counts to no step."""
        return TimedBatches(self, loader)

    def abandon(self) -> None:
        """Stops reading."""
        self._is_open = False
        if self._record is not None:
            self._record.stop_reading()

    @harmless
    def _begin(self) -> None:
        if own_rank() > 0:
            return
        self._record = record = ScriptRecord(
            self._script, self._log_dir, origin_s=time.monotonic(), interval_s=self._interval_s, all_gpus=True
        )
        record.begin()
        self._clock = StepClock(origin_s=record.origin_s)
        self._gpu: int | None = None
        """GPU whose events time the steps; None = the host's clock does."""
        self._num_steps = self._num_passes = 0
        self._is_open = True

    @harmless
    def _end(self, error: BaseException | None) -> None:
        record, self._pass = self._record, None
        if record is None or not self._is_open:
            return
        self._is_open = False
        if not self._num_steps:
            record.seen_s = time.monotonic()
            record.note(NO_BATCH)
        with suppress(RuntimeError) if error is not None else nullcontext():  # of a device that has failed
            if self._gpu is not None and error is None:
                torch.cuda.synchronize(self._gpu)
            self._pass_on(record, wait=error is None)
        evidence = record.finish(ScriptEnd(0 if error is None else 1, error))
        self._copy_curves()
        if not self._quiet:
            record.show(evidence)

    @harmless
    def _ask(self, of: object, loader: object) -> None:
        record = self._record
        if record is None or not self._is_open or self._pass not in (of, None):
            return
        record.seen_s = time.monotonic()
        if self._pass is of:
            self._step_done(record)
        else:
            self._pass = of
            self._loader = SeenLoader(loader) if hasattr(loader, "num_workers") else None
            record.enter("train")
        if self._gpu is None and self._num_steps <= WARMUP_STEPS and (gpu := gpu_in_use()) is not None:
            self._pass_on(record)
            self._gpu, self._clock = gpu, device_clock(record.origin_s, gpu)
        self._clock.ask()
        self._asked = time.perf_counter(), time.thread_time()

    @harmless
    def _got(self, of: object, batch: object) -> None:
        if not self._is_open or self._pass is not of:
            return
        loader, took, self._samples = self._loader, None, 1
        if loader is not None:
            self._samples = samples_in(batch, loader)
            if loader.settings["num_workers"] == 0:
                began_s, cpu_began_s = self._asked
                took = BuildTime(1e3 * (time.perf_counter() - began_s), 1e3 * (time.thread_time() - cpu_began_s))
        self._clock.got()
        self._clock.copy_begins(self._num_passes, took)
        self._clock.copied()

    def _step_done(self, record: ScriptRecord) -> None:
        self._num_steps += 1
        samples, is_warmup = self._samples, self._num_steps <= WARMUP_STEPS
        is_due = self._clock.end(
            step=self._num_steps, samples=samples, micro_batch=samples, num_micro=1, warmup=is_warmup
        )
        if self._loader is not None:
            record.trained_with(self._loader, samples)
        if is_due or is_warmup:
            self._pass_on(record)

    def _pass_on(self, record: ScriptRecord, *, wait: bool = False) -> None:
        if rows := self._clock.rows(wait=wait):
            record.steps(rows)

    @harmless
    def _end_pass(self, of: object) -> None:
        if self._is_open and self._pass is of and self._record is not None:
            self._pass = None
            self._num_passes += 1
            self._record.epochs(self._num_passes)
            self._record.enter("validate")
            self._clock.interrupt()


class TimedBatches(Generic[Batch]):
    """A loader whose batches are steps of a watch. Has the loader's length."""

    def __init__(self, watch: GPUWatch, loader: Iterable[Batch]) -> None:
        self._watch, self._loader = watch, loader

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # which raises as the loader does

    def __iter__(self) -> Iterator[Batch]:
        watch, this_pass = self._watch, object()
        batches: Iterator[Batch] | None = None
        try:
            while True:
                watch._ask(this_pass, self._loader)
                try:
                    if batches is None:
                        batches = iter(self._loader)  # starts workers: the first step waits for them
                    handed = [next(batches)]
                except StopIteration:
                    return
                watch._got(this_pass, handed[0])
                yield handed.pop()  # a local name would keep the batch in memory
        finally:
            watch._end_pass(this_pass)
