"""Runs the stages of one run, in order: machine, data, plan, training, test, ceiling, report."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import InitVar, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from wellfed.config.compose import Composed
from wellfed.config.schema import RunConfig
from wellfed.errors import ConfigError, OutOfMemoryExhausted, RestartNeeded, first_line, shortened
from wellfed.observe.hardware.detect import machine
from wellfed.observe.hardware.facts import MachineFacts
from wellfed.observe.hardware.torch_cuda import torch_cuda
from wellfed.plan.run_plan import RunPlan
from wellfed.process import EXIT_TIME_LIMIT, StopRequest
from wellfed.ranks import launched, own_local_rank, requeue
from wellfed.record.entries import RunRecord
from wellfed.run import screen
from wellfed.run.bookkeeper import Bookkeeper
from wellfed.run.folder.checkpoint_file import RESUMED, WAY_OUT, load_checkpoint
from wellfed.run.folder.resume import Target
from wellfed.run.folder.run_folder import write_first
from wellfed.run.folder.saved_training import SavedTraining
from wellfed.run.objects.run_objects import RunObjects
from wellfed.run.outcome import OK, Outcome
from wellfed.run.outcome_of_error import outcome_of
from wellfed.run.passes.passes import Measure, Passes
from wellfed.run.planner import Planner
from wellfed.run.ranks.coordination import OtherRanks
from wellfed.run.restart import Restarts, may_restart, show_changes, with_changes
from wellfed.train.lightning.callbacks.pruning import Pruner
from wellfed.train.memory import cap, oom
from wellfed.units import for_stream, show_text

_LOG = logging.getLogger(__name__)


@dataclass
class Run:
    """One run in its folder. ``go`` never raises: the outcome is in the record and in the exit code."""

    composed: Composed[RunConfig]
    folder: Path
    record: InitVar[RunRecord]
    target: InitVar[Target | None]
    rank: int
    stop: StopRequest
    began_s: InitVar[float]
    """Start of the command, by the monotonic clock."""
    parts: RunObjects | None = None
    measure: Measure | None = None
    """Limits of a run that is only timed: no validation, no checkpoint, no test, no wandb."""
    others: OtherRanks | None = None
    pruner: Pruner | None = None
    """Pruner, called after each validation. A pruned run skips the test."""
    console: screen.Terminal | None = None
    """Terminal that shows the start; None = a new one."""
    has_trained: bool = field(default=False, init=False)
    """The first batch was requested, so the folder is kept."""
    is_refused: bool = field(default=False, init=False)
    """The run has ended before anything was run."""

    def __post_init__(self, record: RunRecord, target: Target | None, began_s: float) -> None:
        self._config = self.composed.config
        earlier_s = record.duration_s + time.monotonic() - began_s
        self._books = Bookkeeper(record, self.folder, self._config, earlier_s=earlier_s)
        self._others = self.others or OtherRanks(self.rank)
        self._console = self.console or screen.Terminal(quiet=self.rank > 0)
        self._passes: Passes | None = None
        runs = Path(self._config.paths.log_dir) / self._config.workload.name / "runs"
        self._saved = SavedTraining(self.folder, target, is_found=self.folder.parent == runs)

    def go(self) -> int:
        """Runs all stages and returns the exit code."""
        try:
            self._stages()
            outcome = OK
            self.stop.is_finishing = True  # a signal must not cut the record short
        except BaseException as error:  # noqa: BLE001  every end of a run is a result
            self.stop.is_finishing = True
            is_trial = self.measure is not None  # it keeps no checkpoint
            outcome = outcome_of(error, has_trained=self.has_trained, way_on="" if is_trial else None)
            outcome = self._others.outcome(outcome)
            outcome = self._with_what_is_saved(outcome)
            self._show(outcome, error)
        books = self._books
        self.is_refused = outcome.is_refusal
        if self.is_refused and self.measure is None:
            books.journal.sink.finish({}, outcome.exit_code)
            return outcome.exit_code
        has_page = self.rank == 0 and self.measure is None  # it would lengthen short trials
        self._stage("writing the report")
        books.finish(outcome, self._passes.figures.latest if self._passes else {}, has_page=has_page)
        if self.rank == 0:
            screen.show_end(self._console, books.evidence, self.folder)
            is_warned = outcome.exit_code == EXIT_TIME_LIMIT and self.measure is None
            if is_warned and (problem := requeue()) is not None:
                _LOG.warning("The job could not be queued again: %s", problem)
        return outcome.exit_code

    def _stages(self) -> None:
        facts, record = machine(torch_cuda()), self._books.record
        record.machine = facts.entry()
        self._books.passed("imports_s")
        _prepare_machine(facts)
        self._stage("reading data")
        with self._others.in_turn():
            planner = Planner.start(self.composed, facts, self.parts)
        self._books.passed("data_s")
        self._stage("planning")
        plan, books = self._make_plan(planner), self._books
        if plan.device.enforce and plan.device.memory_gib is not None:
            # Lightning has not chosen the rank's card yet.
            cap.cap_cuda(int(plan.device.memory_gib * 2**30), own_local_rank())
        passes = self._make_passes(planner, plan)
        target = self._saved.target
        checkpoint = None if target is None else self._resume_from(target, passes)
        if self.rank == 0 and self.measure is None:
            books.open_loggers(self.composed, plan)
        self._others.ready()
        with self._watching(facts, plan, passes):
            usage = books.training(plan)
            if self.measure is not None:
                self._started()
                books.ceiling(passes.ceiling.warm_up())
                passes.measure(self.measure, self.stop, self._started)
                usage.stop()
                return
            restarts, began_s = Restarts(self.folder, checkpoint, self._others.all_gather), books.journal.time_s()
            while (needed := self._fit(passes, checkpoint, restarts)) is not None:
                checkpoint = restarts.checkpoint_for(needed)
                passes.close()
                planner.parts.end()
                self._passes = self.parts = None
                first = passes.figures.first
                del passes, planner  # frees everything that the training has made
                oom.release()
                planner, plan = self._start_again(needed, facts, plan)
                passes = self._make_passes(planner, plan)
                passes.figures.first.update(first)
                self._restarted(needed, passes, checkpoint, began_s)
            if not self.has_trained:
                _LOG.warning("Nothing was left to train. Raise trainer.max_epochs or trainer.max_steps to go on.")
            usage.stop()
            if not passes.is_pruned:
                self._stage("testing")
                written = {name: str(path.relative_to(self.folder)) for name, path in passes.test().items()}
                record.artifacts.update(written)
                books.ceiling(passes.ceiling.measure(self._console))
            planner.parts.end()
            passes.check_saved()

    def _make_passes(self, planner: Planner, plan: RunPlan) -> Passes:
        may_adapt = self.measure is None  # a smaller step is not the setting to measure
        config, parts, books = planner.config, planner.parts, self._books
        self._passes = Passes(config, parts, plan, books, rank=self.rank, may_adapt=may_adapt, others=self._others)
        self._saved.add(self._passes.saved)
        return self._passes

    def _fit(self, passes: Passes, checkpoint: Path | None, restarts: Restarts) -> RestartNeeded | None:
        """Trains. Returns the changes for a restart if memory ran out in a step that can't be repeated."""
        try:
            passes.fit(self._console, self.stop, checkpoint, self._started, self.pruner)
        except RestartNeeded as needed:
            if not may_restart(self._config, is_measured=self.measure is not None):
                raise
            needed.__context__ = None
            return needed.with_traceback(None)  # the frames hold tensors of the failed step
        except OutOfMemoryExhausted as error:
            restarts.add_to(error)
            raise
        return None

    def _start_again(self, needed: RestartNeeded, facts: MachineFacts, plan: RunPlan) -> tuple[Planner, RunPlan]:
        config, plan = with_changes(self.composed.config, plan, needed.changes, str(needed))
        self.composed = replace(self.composed, config=config)
        self._books.planned(plan)
        planner = Planner.start(self.composed, facts)
        return planner, plan

    def _restarted(self, needed: RestartNeeded, passes: Passes, checkpoint: Path | None, began_s: float) -> None:
        """Cuts record and tables back to the restart's step, and reports the restart."""
        step, epochs = (0, 0.0) if checkpoint is None else _progress_at(load_checkpoint(checkpoint), passes)
        self._books.restarted_at(step, epochs, began_s)
        self._books.journal.event(
            "restart",
            step=step,
            checkpoint=None if checkpoint is None else str(checkpoint),
            because=str(needed),
            changes=needed.changes,
        )
        screen.show_restart(self._console, str(needed), checkpoint, step, show_changes(needed.changes))

    def _watching(self, facts: MachineFacts, plan: RunPlan, passes: Passes) -> AbstractContextManager[Any]:
        """Returns a context that reads this machine, on rank 0 and on the first rank of each other machine."""
        launch = launched()
        if self.rank and (launch is None or not launch.is_first_of_node):
            return nullcontext()
        driven = [index for part in passes.data_parallel.values() for index in part.device_ids]
        return self._books.watching(facts, plan, driven)

    def _make_plan(self, planner: Planner) -> RunPlan:
        config, notes = self._config, planner.parts.data.notes
        plan = self._others.plan(planner)
        self._books.passed("plan_s")
        target = self._saved.target
        self._books.planned(plan, saves=target is None or not target.in_place)
        for note in notes:
            _LOG.info(note)
        if self.rank == 0:
            num_train = planner.data.num_train if planner.data.stream is None else None
            screen.show_plan(self._console, config.workload.name, plan, notes, num_train)
            for warning in plan.warnings:
                _LOG.warning(warning)
        return plan

    def _resume_from(self, target: Target, passes: Passes) -> Path:
        """Returns the checkpoint to resume from, and cuts record and tables back to its step. It must fit the model."""
        checkpoint = target.checkpoint
        state = load_checkpoint(checkpoint, RESUMED)
        passes.check_fits(checkpoint, state)
        try:
            step, epochs = _progress_at(state, passes)
        except (AttributeError, TypeError, ValueError) as error:
            problem = f"holds no position to go on from ({first_line(error)})."
            raise ConfigError.of(str(checkpoint), problem, WAY_OUT) from error
        self._saved.began_at = step
        if self.rank == 0 and target.in_place:
            write_first(self.composed, self.folder, self._books.record)
        self._books.resumed_after(step, epochs, in_place=target.in_place)
        for other in target.damaged:
            self._books.journal.event("checkpoint_damaged", step=step, file=other.name)
            _LOG.warning("%s can't be used; it is passed over for %s of step %d.", other, checkpoint.name, step)
        self._books.journal.event("resume", step=step, checkpoint=str(checkpoint))
        screen.show_resume(self._console, checkpoint, step)
        return checkpoint

    def _started(self) -> None:
        if not self.has_trained and self.measure is None:
            screen.show_folder(self._console, self.folder)
        self.has_trained = True
        self._others.met()

    def _with_what_is_saved(self, outcome: Outcome) -> Outcome:
        if self.measure is not None or self.rank > 0 or outcome.is_refusal or not self.has_trained:
            return outcome
        return self._saved.advised(outcome, self._books.record.steps)

    def _stage(self, name: str) -> None:
        """Shows what the run does now, while no bar is shown."""
        if self.measure is None:
            target = self._saved.target
            origin = None if target is None else target.checkpoint.parent.parent
            screen.show_stage(self._console, self._config.workload.name, origin, name)

    def _show(self, outcome: Outcome, error: BaseException) -> None:
        """Shows what ended the run, on the terminal and in the log, with a traceback only where it helps."""
        self._console.end_stage()
        _LOG.info("ended by %s", "".join(traceback.format_exception(error)))
        if self.rank > 0 and (outcome.is_of_other_rank or (outcome.is_expected and self._others.is_shown_by_rank_0)):
            return
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            traceback.print_exception(error)
        elif not outcome.is_expected:
            stays = not outcome.is_refusal or self.measure is not None
            where = f"all are in {self.folder / 'train.log'}" if stays else "HYDRA_FULL_ERROR=1 shows all"
            print(shortened(error, where), end="", file=sys.stderr)
            if outcome.advice:
                _print_error(outcome.advice)
        else:
            _print_error(f"{outcome.message}\n{outcome.advice}".rstrip())


def _print_error(text: str) -> None:
    with suppress(OSError):  # the terminal may be gone
        print(for_stream(show_text(text), sys.stderr), file=sys.stderr)


def _progress_at(state: Mapping[str, Any], passes: Passes) -> tuple[int, float]:
    """Returns the steps and epochs that were done when a checkpoint was written."""
    step, position = int(state["global_step"]), state.get("position", {})
    stream = position.get("stream")
    part = float(stream["is_over"]) if stream else position.get("batch", 0) / passes.steps_per_epoch
    return step, position.get("epoch", 0) + part


def _prepare_machine(facts: MachineFacts) -> None:
    """Logs the GPUs, and limits torch's threads."""
    for gpu in facts.gpus:
        free = "free memory unknown" if gpu.free_gib is None else f"{gpu.free_gib:.1f} GiB free"
        by = f"; held by {gpu.held_by()}" if gpu.holders else ""
        _LOG.info("gpu %d: %s, %s%s", gpu.index, gpu.describe(), free, by)
    # torch counts the host's cores; threads beyond the quota would wait for one another.
    torch.set_num_threads(max(1, min(torch.get_num_threads(), math.floor(facts.cpu_quota_cores))))
