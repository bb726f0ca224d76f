"""Watches GPUs and host beside a training loop of any framework, and times its steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Generic, Self, TypeVar

from wellfed.monitor.error_guard import harmless
from wellfed.monitor.loop_watcher import LoopWatcher
from wellfed.ranks import launched, own_local_rank

Batch = TypeVar("Batch")


class GPUWatch(LoopWatcher):
    """Reads GPUs and host during the ``with`` block, times the steps of `batches`, and prints a summary.

    A step is the body of the loop over `batches`, plus the wait for its batch. Where torch uses CUDA, events on the
    device time the steps without synchronising. Otherwise the host's clock does. Errors in here are logged once and do
    not affect training. A use that times nothing is logged, too. If torchrun or srun start several processes on a
    machine, the first one watches.
    """

    _is_entered = False
    _pass: object | None = None
    """Loop over `batches` that goes on."""

    def __enter__(self) -> Self:
        self._is_entered = True
        self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(is_ok=kind is None)
        self._is_entered = False

    def batches(self, loader: Iterable[Batch]) -> Iterable[Batch]:
        """Returns the loader's batches, each as a step: ``for x, y in watch.batches(loader):``. Use it for training
        only. Time between two such loops (validation, checkpoints) counts to no step."""
        return TimedBatches(self, loader)

    @harmless
    def _begin(self) -> None:
        if own_local_rank() == 0:
            launch = launched()
            self._open(0 if launch is None else launch.node)
            if self._watch is not None:
                self._watch.steps.unknown.add("copy_frac")  # the loop's body copies, as part of the step

    @harmless
    def _end(self, *, is_ok: bool) -> None:
        self._pass = None
        if self._watch is None or not self._close(is_ok=is_ok):
            return
        if "wait_frac" in self._watch.steps.unknown and is_ok:  # no batch was requested
            self._watch.note("No batch came through watch.batches(loader) in this block, so no step was timed.")
        self._print(self.lines())

    @harmless
    def _ask(self, of: object, loader: object) -> None:
        if not self._is_entered:
            self._warn("watch.batches is gone over outside of the with block: nothing is timed there.")
        watch = self._watch
        if watch is None or not self._is_open:
            return
        if self._pass is of:
            watch.steps.done()
        elif self._pass is None:
            self._pass = of
            watch.fed_by(loader)
            watch.enter("train")
        else:
            self._warn(
                "Several loops over watch.batches run at once: only the steps of the first are timed. For two loaders "
                "write watch.batches(zip(a, b))."
            )
            return
        watch.steps.use_events()
        watch.steps.ask()

    @harmless
    def _got(self, of: object) -> None:
        if self._watch is not None and self._is_open and self._pass is of:
            self._watch.steps.got()
            self._watch.steps.copied()

    @harmless
    def _end_pass(self, of: object) -> None:
        if self._watch is not None and self._is_open and self._pass is of:
            self._pass = None
            self._watch.enter("validate")


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
                watch._got(this_pass)
                yield handed.pop()  # a local name would keep the batch in memory
        finally:
            watch._end_pass(this_pass)
