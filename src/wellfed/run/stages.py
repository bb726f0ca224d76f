"""The stages of one run, in order: machine, data, plan, training, test, ceiling, report."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
import traceback
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from wellfed.config.compose import Composed
from wellfed.config.schema import RunConfig
from wellfed.diagnosis.ceiling_check import contradiction
from wellfed.diagnosis.report import to_markdown
from wellfed.errors import EXIT_NOTHING_RUN
from wellfed.hardware.detect import machine
from wellfed.hardware.facts import MachineFacts
from wellfed.hardware.torch_cuda import torch_cuda
from wellfed.lit.callbacks.checkpoints import BEST, LAST
from wellfed.memory import cap
from wellfed.memory.checkpointing import checkpoint_blocks
from wellfed.planning.run_plan import RunPlan
from wellfed.record import RunRecord
from wellfed.run import assemble, record_figures, screen
from wellfed.run.checkpoint_file import load_checkpoint
from wellfed.run.gpu_monitor import MachineWatch
from wellfed.run.outcome import OK, Outcome, outcome_of
from wellfed.run.passes import Measure, Passes
from wellfed.run.planner import Planner
from wellfed.run.ranks import WAIT_S, RankZero, leave_for_rank_0, take_from_ranks, told_by_rank_0
from wellfed.run.resume import CHECKPOINTS, Target, differences
from wellfed.stop_request import StopRequest
from wellfed.telemetry.run_progress import Progress
from wellfed.tracking import wandb_sink
from wellfed.tracking.journal import Journal

_LOG = logging.getLogger(__name__)
_ARTIFACTS = {
    "steps": "steps.csv",
    "metrics": "metrics.csv",
    "telemetry": "telemetry.csv",
    "log": "train.log",
    "last": f"{CHECKPOINTS}/{LAST}",
    "best": f"{CHECKPOINTS}/{BEST}",
    "profile": "profile.json",
}


class Run:
    """One run in its folder. ``go`` never raises: whatever ended the run is in the record and in the exit code.

    Args:
        began_s: when the command started, by the monotonic clock.
        parts: data and model, where they are there already; trained as they are.
        measure: only time the training: no validation, no checkpoint, no test, no wandb.
    """

    def __init__(
        self,
        composed: Composed[RunConfig],
        folder: Path,
        record: RunRecord,
        target: Target | None,
        *,
        rank: int,
        stop: StopRequest,
        began_s: float,
        parts: assemble.Parts | None = None,
        measure: Measure | None = None,
    ) -> None:
        self._parts, self._measure = parts, measure
        self._composed, self._config = composed, composed.config
        self._folder, self._target, self._rank, self._record = folder, target, rank, record
        self._journal = Journal(record, folder, earlier_s=record.duration_s + time.monotonic() - began_s)
        self._console = screen.Terminal(quiet=rank > 0, highlight=False, emoji=False)
        self._stop = stop
        self.has_trained = False
        """The first batch was asked for: from here on the folder stays."""
        self._usage = record_figures.Usage()
        self._progress = Progress(time_s=self._journal.time_s)
        self._watch: MachineWatch | None = None
        self._passes: Passes | None = None
        self._plan: RunPlan | None = None
        self._ballast: torch.Tensor | None = None
        self._rank_0 = RankZero.told() if rank > 0 else None
        self._folder_of_rank_0 = None if self._rank_0 is None else self._rank_0.folder
        """Known at the start where rank 0 has started this one, else once the ranks have met."""
        self._is_left = False
        """Rank 0 tells how this rank has ended."""

    def go(self) -> int:
        """All stages; the exit code."""
        try:
            self._stages()
            outcome = OK
            self._stop.is_finishing = True  # a signal must not cut the record short
        except BaseException as error:  # noqa: BLE001  every end of a run is a result
            self._stop.is_finishing = True
            is_trial = self._measure is not None  # it keeps nothing to go on from
            outcome = outcome_of(error, has_trained=self.has_trained, way_on="" if is_trial else None)
            if self._config.trainer.devices > 1:
                outcome = self._with_other_ranks(outcome)
            self._tell(outcome, error)
        if outcome.exit_code == EXIT_NOTHING_RUN and self._measure is None:
            self._journal.sink.finish({}, outcome.exit_code)
        else:
            self._finish(outcome)
        return outcome.exit_code

    def _with_other_ranks(self, outcome: Outcome) -> Outcome:
        """Rank 0 takes the reason of a rank that ended before it; the others leave theirs."""
        if self._rank == 0:
            is_stopped = outcome.status == "interrupted"  # by torchrun, perhaps, because a rank had ended
            if outcome.is_expected and not (outcome.is_of_other_rank or is_stopped):
                return outcome
            found = take_from_ranks(self._folder, wait_s=0 if is_stopped else WAIT_S)
            # Its traceback has been shown there; the one at hand tells of a broken connection.
            return outcome if found is None else replace(found, is_expected=True)
        if self._folder_of_rank_0 is not None and not outcome.is_of_other_rank:
            self._is_left = leave_for_rank_0(outcome, self._folder_of_rank_0, self._rank)
        return outcome

    def _stages(self) -> None:
        facts = self._look_at_machine()
        # torch counts the host's cores; more threads than the quota only take turns, and wait for one another.
        torch.set_num_threads(max(1, min(torch.get_num_threads(), math.floor(facts.cpu_quota_cores))))
        planner = Planner.start(self._composed, facts, self._parts)
        parts, plan = planner.parts, self._make_plan(planner)
        self._say_differences()
        self._ballast = _prepare_device(self._config, plan, parts)
        self._usage.ballast_bytes = 0 if self._ballast is None else self._ballast.nbytes
        passes = Passes(
            self._config,
            parts,
            plan,
            self._journal,
            checkpoints=self._folder / CHECKPOINTS,
            rank=self._rank,
            on_event=self._journal.event,
            progress=self._progress,
            may_adapt=self._measure is None,  # a smaller step is another setting than the one to be measured
        )
        self._passes = passes
        passes.on_saved = self._saved
        checkpoint = None if self._target is None else self._go_on_from(self._target, passes)
        self._open_sink()
        with self._watching(facts, plan):
            self._train(passes, plan, checkpoint)

    def _train(self, passes: Passes, plan: RunPlan, checkpoint: Path | None) -> None:
        self._usage.start(plan)
        if self._measure is not None:
            self._started()
            self._note_ceiling(passes.warm_up())
            passes.measure(self._measure, self._stop, on_start=self._started, on_step=self._stepped)
            self._usage.stop()
            return
        passes.fit(self._console, self._stop, checkpoint, on_start=self._started, on_step=self._stepped)
        if not self.has_trained:
            _LOG.warning("Nothing was left to train. Raise trainer.max_epochs or trainer.max_steps to go on.")
        self._usage.stop()
        written = passes.test()
        self._record.artifacts.update({name: str(path.relative_to(self._folder)) for name, path in written.items()})
        self._note_ceiling(passes.ceiling())

    def _note_ceiling(self, samples_per_s: float | None) -> None:
        if samples_per_s is not None:
            self._record.ceiling = {"samples_per_s": samples_per_s}

    # -- before training ------------------------------------------------------------------------------------------

    def _look_at_machine(self) -> MachineFacts:
        facts = machine(torch_cuda())
        self._record.machine = record_figures.machine_entry(facts)
        for gpu in facts.gpus:
            free = "free memory unknown" if gpu.free_gib is None else f"{gpu.free_gib:.1f} GiB free"
            by = f"; held by {gpu.held_by()}" if gpu.holders else ""
            _LOG.info("gpu %d: %s, %s%s", gpu.index, gpu.describe(), free, by)
        return facts

    def _make_plan(self, planner: Planner) -> RunPlan:
        config, notes = self._config, planner.parts.data.notes
        if self._rank_0 is not None:
            planner = replace(planner, device=self._rank_0.device(planner.device))
        plan = planner.for_training(self._rank)
        if self._rank_0 is not None:
            plan = self._rank_0.plan(plan)
        elif self._rank == 0 and config.trainer.devices > 1:
            RankZero(self._folder, plan.device.memory_gib, plan.loader).tell(self._composed.overrides)
        self._plan = plan
        self._record.plan = plan.to_dict()
        self._journal.save()
        for note in notes:
            _LOG.info(note)
        if self._rank == 0:
            screen.show_plan(self._console, config.workload.name, plan, notes, self._folder)
            for warning in plan.warnings:
                _LOG.warning(warning)
        return plan

    def _say_differences(self) -> None:
        """With rerun: what is not as it was then."""
        if not self._config.rerun or self._rank > 0:
            return
        earlier = RunRecord.read(Path(self._config.rerun))
        found = differences(earlier.config, {**self._composed.resolved, "rerun": earlier.config.get("rerun")})
        found += differences(earlier.machine.get("versions"), self._record.machine["versions"], "versions")
        found += differences(earlier.git, self._record.git, "git") if self._record.git else []
        screen.show_differences(self._console, self._config.rerun, found)

    def _open_sink(self) -> None:
        logger = self._config.logger
        mode = wandb_sink.decide_mode(logger.mode.value)
        if self._rank > 0 or mode == "disabled" or self._measure is not None:  # a sweep publishes its trials itself
            return
        earlier = self._record.wandb
        try:
            sink = wandb_sink.open_run(
                self._folder,
                mode=mode,
                project=logger.project,
                entity=logger.entity,
                group=logger.group,
                name=self._record.run_id,
                run_id=earlier["id"] if earlier else None,
                config=self._composed.resolved,
                on_lost=self._logger_lost,
            )
        except RuntimeError as error:
            _LOG.warning("%s; the files have every figure.", error)
            self._logger_lost(str(error))
            return
        self._journal.sink = sink
        parts = [*(earlier["parts"] if earlier else []), str(sink.folder)]
        self._record.wandb = {"id": sink.id, "mode": sink.mode, "path": str(sink.folder), "parts": parts}

    def _watching(self, facts: MachineFacts, plan: RunPlan) -> AbstractContextManager[Any]:
        self._progress.step = self._record.steps
        if self._rank > 0 or not self._config.telemetry.enabled:
            return nullcontext()
        self._watch = MachineWatch(self._config.telemetry, facts, plan, self._journal, self._progress)
        return self._watch

    def _go_on_from(self, target: Target, passes: Passes) -> Path:
        """Put the record and the tables back to where the checkpoint was written; the checkpoint.

        Raises:
            ConfigError: it can't be loaded or does not fit; nothing has been changed then.
        """
        state = load_checkpoint(target.checkpoint)
        passes.check_fits(target.checkpoint, state)
        record, step, position = self._record, int(state["global_step"]), state.get("position", {})
        record.steps = step
        record.epochs = position.get("epoch", 0) + position.get("batch", 0) / passes.steps_per_epoch
        if target.in_place:
            self._journal.cut_after(step)
            record.samples = self._journal.samples_written()
        self._journal.event("resume", step=step, checkpoint=str(target.checkpoint))
        return target.checkpoint

    # -- while training -------------------------------------------------------------------------------------------

    def _logger_lost(self, message: str) -> None:
        self._journal.event("logger_lost", message=message)

    def _started(self) -> None:
        self.has_trained = True
        if dist.is_available() and dist.is_initialized():
            self._folder_of_rank_0 = told_by_rank_0(self._folder)

    def _stepped(self, steps: int, epochs: float, samples: int) -> None:
        self._record.steps, self._record.epochs = steps, epochs
        self._record.samples += samples

    def _saved(self, step: int, name: str) -> None:
        self._journal.event("checkpoint", step=step, file=name)
        self._fill_in()
        self._journal.save()

    def _fill_in(self) -> None:
        """Bring the record's figures up to date."""
        record = self._record
        record_figures.fill_in(record, self._journal.summary(), self._config)
        if self._passes is not None:
            record.metrics = {**record.metrics, **self._passes.latest}
        record.memory = self._usage.memory(self._plan) or record.memory
        record.host = self._usage.host() or record.host
        if self._watch is not None:
            record.gpus = self._watch.gpus()
            record.telemetry = self._watch.cost()

    # -- after training -------------------------------------------------------------------------------------------

    def _finish(self, outcome: Outcome) -> None:
        record = self._record
        record.status, record.exit_code = outcome.status, outcome.exit_code
        if outcome.kind is not None:
            record.error = {"kind": outcome.kind, "message": outcome.message, "advice": outcome.advice}
        if outcome.status == "interrupted":
            self._journal.event("signal", message=outcome.message)
        self._fill_in()
        doubt = contradiction(record)
        if doubt is not None:
            self._journal.event("ceiling_doubtful", slower=doubt.slower, data_frac=round(doubt.data_frac, 4))
        self._journal.save()
        record.artifacts.update({name: path for name, path in _ARTIFACTS.items() if (self._folder / path).exists()})
        record.artifacts["report"] = "report.md"
        try:
            report = to_markdown(record)  # a path may hold what is no UTF-8
            (self._folder / "report.md").write_text(report, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            self._journal.disk_full(error, record.steps)
        self._journal.sink.finish(record.metrics, outcome.exit_code)
        self._journal.save()
        if self._rank == 0:
            screen.show_end(self._console, record, self._passes.first if self._passes else {}, self._folder)

    def _tell(self, outcome: Outcome, error: BaseException) -> None:
        """What ended the run, on the terminal and in the log; the traceback only where it helps."""
        _LOG.info("ended by %s", "".join(traceback.format_exception(error)))
        if self._rank > 0 and (outcome.is_of_other_rank or (outcome.is_expected and self._is_left)):
            return
        if os.environ.get("HYDRA_FULL_ERROR") == "1" or not outcome.is_expected:
            traceback.print_exception(error)
        else:
            print(f"{outcome.message}\n{outcome.advice}".rstrip(), file=sys.stderr)


def _prepare_device(config: RunConfig, plan: RunPlan, parts: assemble.Parts) -> torch.Tensor | None:
    """What must hold before the model reaches its device; the ballast, if there is one."""
    ballast = None
    if plan.device.enforce and plan.device.memory_gib is not None:
        budget_bytes = int(plan.device.memory_gib * 2**30)
        if plan.on_gpu:
            own = int(os.environ.get("LOCAL_RANK", "0"))  # Lightning chooses the rank's card later
            ballast = cap.cap_cuda(budget_bytes, ballast=config.gpu.ballast, device=own)
        elif cap.cap_host(budget_bytes) is None:
            _LOG.warning("gpu.enforce=true: this system has no RLIMIT_DATA to set, or a lower one is set already.")
    if config.gpu.channels_last:
        parts.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if plan.memory.checkpoint_activations and checkpoint_blocks(parts.model) == 0:
        _LOG.warning(
            "memory.checkpoint_activations=true has no effect: the model has no nn.ModuleList or nn.Sequential."
        )
    return ballast
