"""Watches GPUs and host beside a training loop of any framework, and times its steps."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from wellfed.ranks import own_rank
from wellfed.watch.error_guard import harmless
from wellfed.watch.loop_watch import LoopWatch
from wellfed.watch.script_process import ScriptEnd
from wellfed.watch.watched_script import WatchedScript

if TYPE_CHECKING:  # imports torch
    from wellfed.watch.script_record import SeenLoader
    from wellfed.watch.script_steps import ScriptSteps

Batch = TypeVar("Batch")


class GPUWatch(LoopWatch):
    """Reads GPUs and host during the ``with`` block, times the steps of `batches`, and leaves a run folder.

    A step is the body of the loop over `batches`, plus the wait for its batch. Where torch uses CUDA, events on the
    device time the steps without synchronising. Otherwise the host's clock does. Errors in here are logged once and do
    not affect training. Of several processes of a training the first one watches. Within another watch it does nothing,
    and `summary` has the figures of that one.
    """

    _steps: ScriptSteps | None = None
    """Steps of the block; None outside of it."""
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
        steps, self._steps = self._steps, None
        if steps is not None and self._record is not None:
            self._record.stop_reading()

    @harmless
    def _begin(self) -> None:
        from wellfed.watch.script_record import ScriptRecord
        from wellfed.watch.script_steps import ScriptSteps

        outer = WatchedScript.current
        if outer is not None:
            self._record = outer.record if isinstance(outer.record, ScriptRecord) else None
        elif own_rank() == 0:
            self._record = ScriptRecord(
                self._script, self._log_dir, origin_s=time.monotonic(), interval_s=self._interval_s, all_gpus=True
            )
            self._record.begin()
            self._steps = ScriptSteps(self._record, needs_grad=False)

    @harmless
    def _end(self, error: BaseException | None) -> None:
        record, steps = self._record, self._steps
        self._steps = self._pass = None
        if record is None or steps is None:
            return
        steps.finish(has_error=error is not None)
        if not record.record.steps:
            record.seen_s = time.monotonic()
        evidence = record.finish(ScriptEnd(0 if error is None else 1, error))
        self._copy_curves()
        if not self._quiet:
            record.show(evidence)

    @harmless
    def _ask(self, of: object, loader: SeenLoader) -> None:
        steps = self._steps
        if steps is None or self._pass not in (of, None):
            return
        if self._pass is of:
            steps.optimizer(self, is_done=False)
            steps.optimizer(self, is_done=True)
            steps.asked(loader)
        else:
            self._pass, loader.is_trained = of, True
            steps.iterated(loader)
        self._asked = time.perf_counter(), time.thread_time()

    @harmless
    def _got(self, of: object, loader: SeenLoader, batch: object) -> None:
        from wellfed.batches import BuildTime

        if self._steps is not None and self._pass is of:
            began_s, cpu_began_s = self._asked
            took = BuildTime(1e3 * (time.perf_counter() - began_s), 1e3 * (time.thread_time() - cpu_began_s))
            self._steps.got(loader, batch, took if loader.settings["num_workers"] == 0 else None)

    @harmless
    def _end_pass(self, of: object, loader: SeenLoader) -> None:
        if self._steps is not None and self._pass is of and self._record is not None:
            self._pass = None
            self._steps.exhausted(loader)
            self._record.enter("validate")


class TimedBatches(Generic[Batch]):
    """A loader whose batches are steps of a watch. Has the loader's length."""

    def __init__(self, watch: GPUWatch, loader: Iterable[Batch]) -> None:
        from wellfed.watch.script_record import SeenLoader

        self._watch, self._loader, self._seen = watch, loader, SeenLoader(loader)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # which raises as the loader does

    def __iter__(self) -> Iterator[Batch]:
        watch, this_pass = self._watch, object()
        batches: Iterator[Batch] | None = None
        try:
            while True:
                watch._ask(this_pass, self._seen)
                try:
                    if batches is None:
                        batches = iter(self._loader)  # starts workers: the first step waits for them
                    handed = [next(batches)]
                except StopIteration:
                    return
                watch._got(this_pass, self._seen, handed[0])
                yield handed.pop()  # a local name would keep the batch in memory
        finally:
            watch._end_pass(this_pass, self._seen)
