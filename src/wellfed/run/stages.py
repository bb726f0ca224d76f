"""Runs the stages of one run, in order: machine, data, plan, training, test, ceiling, report."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from wellfed.errors import EXIT_OUT_OF_MEMORY, ConfigError, OutOfMemoryExhausted, RestartNeeded, first_line, shortened
from wellfed.observe.hardware.detect import machine
from wellfed.observe.hardware.torch_cuda import torch_cuda
from wellfed.plan.run_plan import RunPlan
from wellfed.process import EXIT_TIME_LIMIT
from wellfed.ranks import launched, own_local_rank, requeue
from wellfed.run import restart, screen
from wellfed.run.bookkeeper import Bookkeeper
from wellfed.run.folder.checkpoint_file import RESUMED, load_checkpoint
from wellfed.run.folder.resume import Target, saved_step
from wellfed.run.folder.run_folder import write_first
from wellfed.run.outcome import OK, Outcome, outcome_of
from wellfed.run.passes.choice import passes_class
from wellfed.run.planner import Planner
from wellfed.run.ranks.coordination import OtherRanks, SharedRun
from wellfed.train.memory import oom
from wellfed.units import for_stream, show_text

if TYPE_CHECKING:
    from wellfed.run.passes.guest_passes import GuestPasses
    from wellfed.run.passes.plain_passes import PlainPasses
    from wellfed.run.train import Start

_LOG = logging.getLogger(__name__)
_SPARE_FILES = 16


class Run:
    """The stages of one run. ``go`` never raises: the outcome is in the record and in the exit code."""

    def __init__(self, start: Start) -> None:
        self._start, self._rank, self._is_trial = start, start.rank, start.is_trial
        self._folder, self._console = start.folder.path, start.console
        earlier_s = start.record.duration_s + time.monotonic() - start.began_s
        self._books = Bookkeeper(start.record, self._folder, start.composed.config, earlier_s=earlier_s)
        target = start.target and replace(start.target, checkpoint=start.target.checkpoint.resolve())
        self._shared = start.shared or SharedRun(start.composed, target, start.folder.path.resolve())
        self._others = OtherRanks(self._rank, self._shared, start.exchange)
        self._passes: GuestPasses | PlainPasses | None = None
        self._has_trained = False

    def go(self) -> int:
        """Runs all stages and returns the exit code."""
        start, stop, books = self._start, self._start.stop, self._books
        try:
            with _spare_files():
                self._stages()
            outcome = OK
            stop.is_finishing = True  # a signal must not cut the record short
        except BaseException as error:  # noqa: BLE001  every end of a run is a result
            start.folder.stays = self._is_trial or self._has_trained  # whatever fails from here on
            stop.is_finishing = True
            outcome = outcome_of(error, has_trained=self._has_trained)
            if self._has_trained and self._rank == 0 and self._others.exchange is not None:
                books.ended(outcome)  # before it waits: Lightning kills rank 0 soon after another rank was killed
                books.journal.save()
            outcome = self._others.outcome(outcome)
            if self._has_trained and self._rank == 0 and not self._is_trial:
                outcome = self._with_what_is_saved(outcome)
            self._show(outcome, error)
        start.folder.stays = self._is_trial or not outcome.is_refusal
        try:
            if not start.folder.stays:
                books.journal.sink.finish({}, outcome.exit_code)
                return outcome.exit_code
            has_page = self._rank == 0 and not self._is_trial  # it would lengthen short trials
            books.finish(outcome, self._passes.figures.latest if self._passes else {}, has_page=has_page)
            if self._rank == 0:
                screen.show_end(self._console, books.evidence, self._folder)
                is_out_of_time = outcome.exit_code == EXIT_TIME_LIMIT and not self._is_trial
                if is_out_of_time and (problem := requeue()) is not None:
                    _LOG.warning("The job could not be queued again: %s", problem)
            return outcome.exit_code
        finally:
            self._others.close(outcome.exit_code)

    def _stages(self) -> None:
        start, books, record = self._start, self._books, self._books.record
        facts = machine(torch_cuda())
        record.machine = facts.entry()
        books.passed("imports_s")
        # torch counts the host's cores; threads beyond the quota would wait for one another.
        torch.set_num_threads(max(1, min(torch.get_num_threads(), math.floor(facts.cpu_quota_cores))))
        with self._others.in_turn():
            planner = Planner.start(start.composed, facts, start.parts)
        books.passed("data_s")
        plan = self._make_plan(planner)
        if plan.device.enforce and plan.device.memory_gib is not None:
            # Lightning has not chosen the rank's card yet.
            oom.cap_cuda(int(plan.device.memory_gib * 2**30), own_local_rank())
        # A trial may not adapt: a smaller step is not the setting to measure.
        about: dict[str, Any] = {"rank": self._rank, "may_adapt": not self._is_trial, "others": self._others}
        self._passes = passes = passes_class(planner.parts)(planner.config, planner.parts, plan, books, **about)
        checkpoint = None if start.target is None else self._resume_from(start.target, passes)
        if self._rank == 0 and not self._is_trial:  # a sweep logs its trials itself
            books.open_loggers(start.composed, plan)
        if (together := self._others.together) is not None:  # all ranks are about to meet in a collective of torch
            together.meet("training")
        launch = launched()  # the first rank of each machine reads that machine
        with books.watching(facts, plan) if not self._rank or (launch and launch.is_first_of_node) else nullcontext():
            usage = books.training(plan)
            if self._is_trial:
                self._started()
                books.ceiling(passes.ceiling.warm_up())
                passes.measure(start.composed.config.sweep.trial_steps, start.stop, self._started)
                usage.stop()
                return
            self._fit(passes, checkpoint)
            if not self._has_trained:
                _LOG.warning("Nothing was left to train. Raise trainer.max_epochs or trainer.max_steps to go on.")
            usage.stop()
            if not passes.is_pruned:
                written = {name: str(path.relative_to(self._folder)) for name, path in passes.test().items()}
                record.artifacts.update(written)
                books.ceiling(passes.ceiling.measure(self._console))
            passes.check_saved()

    def _fit(self, passes: GuestPasses | PlainPasses, checkpoint: Path | None) -> None:
        """Trains. If memory runs out in a step that can't be repeated, the run is restarted if it may be."""
        start, books, exchange = self._start, self._books, self._others.exchange
        if (reason := start.restarts.reason) is not None:
            for event in reason["events"]:
                books.journal.event(**{name: value for name, value in event.items() if name != "time_s"})
            why = {name: reason[name] for name in ("because", "changes")}
            books.journal.event("restart", checkpoint=checkpoint and str(checkpoint), **why)
            books.journal.save()
        may_restart = exchange is None or exchange.launch.by == "Lightning"
        if may_restart and exchange is not None and self._rank == 0:
            start.restarts.listen(start.folder)
        try:
            passes.fit(self._console, start.stop, checkpoint, self._started, start.pruner)
        except RestartNeeded as needed:
            if advice := start.restarts.why_not(needed, start.composed, is_own=may_restart):
                raise OutOfMemoryExhausted(f"{str(needed).removesuffix('.')}. {advice}", needed.kind) from None
            if exchange is None:
                books.journal.sink.finish({}, EXIT_OUT_OF_MEMORY)
                books.journal.save()
                start.restarts.now(start.folder, restart.reason_of(needed))
            else:
                restart.ask(self._shared.folder, restart.reason_of(needed, books.record.events, rank=self._rank))
            raise

    def _make_plan(self, planner: Planner) -> RunPlan:
        notes, target = planner.parts.data.notes, self._start.target
        plan = self._others.plan(planner)
        self._books.passed("plan_s")
        self._books.planned(plan, saves=target is None or not target.in_place)
        for note in notes:
            _LOG.info(note)
        if self._rank == 0:
            num_train = planner.data.num_train if planner.data.own_loader is None else None
            screen.show_plan(self._console, self._start.composed.config.workload.name, plan, notes, num_train)
            for warning in plan.warnings:
                _LOG.warning(warning)
        return plan

    def _resume_from(self, target: Target, passes: GuestPasses | PlainPasses) -> Path:
        """Returns the checkpoint to resume from, and cuts record and tables back to its step. It must fit the model."""
        checkpoint, trusted = target.checkpoint, self._start.composed.config.trainer.trusted_checkpoints
        state = load_checkpoint(checkpoint, RESUMED, trusted=trusted)
        passes.check_fits(f"resume={checkpoint}", state)
        try:
            step, epochs = _progress_at(state, passes)
        except (AttributeError, TypeError, ValueError) as error:
            problem = f"holds no position to go on from ({first_line(error)})."
            raise ConfigError.of(str(checkpoint), problem, "Name another, e.g. last-1.ckpt.") from error
        self._books.resumed_after(step, epochs, in_place=target.in_place)
        for other in target.damaged:
            self._books.journal.event("checkpoint_damaged", step=step, file=other.name)
            _LOG.warning("%s can't be used; it is passed over for %s of step %d.", other, checkpoint.name, step)
        self._books.journal.event("resume", step=step, checkpoint=str(checkpoint))
        self._console.print(f"Resuming {target.folder} at step {step} ({checkpoint.name})", soft_wrap=True)
        return checkpoint

    def _started(self) -> None:
        if not self._has_trained and not self._is_trial:
            self._console.print(f"folder  {self._folder}", soft_wrap=True)
            if self._rank == 0 and self._start.folder.is_resumed:  # a refused resume leaves the record as it was
                write_first(self._start.composed, self._folder, self._books.record)
        self._has_trained = True

    def _with_what_is_saved(self, outcome: Outcome) -> Outcome:
        """Returns the outcome with advice on how much of the training is saved, and how to resume it."""
        folder, config, steps = self._folder, self._start.composed.config, self._books.record.steps
        runs = Path(config.paths.log_dir) / config.workload.name / "runs"
        try:
            name, step = saved_step(folder, trusted=config.trainer.trusted_checkpoints)
        except OSError:  # the folder can't be read now: nothing is known of what it holds
            return outcome
        how = f"There is no checkpoint to go on from; rerun={folder} starts it again."
        if name is not None:
            how = f"resume={'auto' if folder.parent == runs else folder} goes on from step {step} ({name})."
        elif self._start.target is not None:
            how = f"There is no checkpoint here; resume={self._start.target.checkpoint} goes on from its start."
        saved = f"last saved step {step} of {steps}." if step < steps else ""
        return replace(outcome, advice=" ".join(filter(None, (outcome.advice, saved, how))))

    def _show(self, outcome: Outcome, error: BaseException) -> None:
        """Shows what ended the run, on the terminal and in the log, with a traceback only where it helps."""
        _LOG.info("ended by %s", "".join(traceback.format_exception(error)))
        if self._rank > 0 and (outcome.is_of_other_rank or (outcome.is_expected and self._others.together)):
            return
        text = f"{outcome.message}\n{outcome.advice}"
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            text = "".join(traceback.format_exception(error))
        elif not outcome.is_expected:
            stays = self._rank == 0 and (not outcome.is_refusal or self._is_trial)
            where = f"all are in {self._folder / 'train.log'}" if stays else "HYDRA_FULL_ERROR=1 shows all"
            text = f"{shortened(error, where)}{outcome.advice}"
        with suppress(OSError):  # the terminal may be gone
            print(for_stream(show_text(text.rstrip()), sys.stderr), file=sys.stderr)


@contextmanager
def _spare_files() -> Iterator[None]:
    """Holds files open for the block: with too many open files, the end of a run still has handles for its record."""
    with ExitStack() as held:
        with suppress(OSError):
            for _ in range(_SPARE_FILES):
                held.enter_context(Path(os.devnull).open("rb"))
        yield


def _progress_at(state: Mapping[str, Any], passes: GuestPasses | PlainPasses) -> tuple[int, float]:
    """Returns the steps and epochs that were done when a checkpoint was written."""
    step, position = int(state["global_step"]), state.get("position", {})
    stream = position.get("stream")
    part = float(stream["is_over"]) if stream else position.get("batch", 0) / (passes.steps_per_epoch or math.inf)
    return step, position.get("epoch", state.get("epoch", 0)) + part  # Lightning's own files have no position
