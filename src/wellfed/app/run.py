"""The stages of one run, in order: machine, data, plan, training, test, ceiling, report."""

from __future__ import annotations

import logging
import os
import resource
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
from rich.console import Console

from wellfed.app import assemble, screen
from wellfed.app.outcome import OK, Outcome, outcome_of
from wellfed.app.resume import CHECKPOINTS, Target, differences
from wellfed.config.check import check_imported
from wellfed.config.compose import Composed
from wellfed.config.schema import RunConfig
from wellfed.diagnosis.report import to_markdown
from wellfed.errors import EXIT_NOTHING_RUN, ConfigError
from wellfed.hardware.detect import machine
from wellfed.hardware.facts import MachineFacts
from wellfed.hardware.torch_cuda import torch_cuda
from wellfed.lit import trainer as lit
from wellfed.lit.callbacks.checkpoints import BEST, LAST, Checkpoints
from wellfed.lit.callbacks.clock import Clock, TimedLoader
from wellfed.lit.callbacks.figures import Figures
from wellfed.lit.callbacks.profile import Profile
from wellfed.lit.callbacks.progress import ProgressBar
from wellfed.lit.callbacks.stop import StopAtStepEnd, StopRequest
from wellfed.lit.module import StepModule, StepOptions
from wellfed.lit.step import parameter_groups
from wellfed.memory.checkpointing import checkpoint_blocks
from wellfed.memory.ladder import MicroBatches
from wellfed.planning.plan import RunPlan, plan_device, plan_run
from wellfed.record import RunRecord, read
from wellfed.timing.clock import StepClock
from wellfed.timing.readiness import StepSummary
from wellfed.tracking import wandb as tracking_wandb
from wellfed.tracking.journal import Journal
from wellfed.units import gib

_LOG = logging.getLogger(__name__)


class Run:
    """One run in its folder. ``go`` never raises: whatever ended the run is in the record and in the exit code."""

    def __init__(
        self, composed: Composed[RunConfig], folder: Path, record: RunRecord, target: Target | None, *, rank: int
    ) -> None:
        self._composed, self._config = composed, composed.config
        self._folder, self._target, self._rank = folder, target, rank
        self._journal = Journal(record, folder, earlier_s=record.duration_s if target and target.in_place else 0.0)
        self._console = Console(stderr=False, quiet=rank > 0, highlight=False)
        self._stop = StopRequest()
        self._has_trained = False
        self._rss_before = 0

    @property
    def _record(self) -> RunRecord:
        return self._journal.record

    def go(self) -> int:
        """All stages; the exit code."""
        with self._stop.listening():
            try:
                self._stages()
                outcome = OK
            except BaseException as error:  # noqa: BLE001  every end of a run is a result
                outcome = outcome_of(error, has_trained=self._has_trained)
                self._tell(outcome, error)
        if outcome.exit_code != EXIT_NOTHING_RUN:
            self._finish(outcome)
        return outcome.exit_code

    def _stages(self) -> None:
        config, began_s = self._config, time.monotonic()
        facts, device = self._look_at_machine()
        torch.manual_seed(config.seed)
        pl.seed_everything(config.seed, verbose=False)
        parts = assemble.make_parts(config)
        for note in parts.data.notes:
            _LOG.warning(note)
        plan = plan_run(
            config,
            self._composed.choices,
            facts,
            device,
            assemble.data_facts(parts),
            assemble.model_facts(parts, config),
        )
        if isinstance(plan, list):
            raise ConfigError(plan)
        self._plan = plan
        self._record.plan = plan.to_dict()
        self._journal.save()
        if self._rank == 0:
            screen.show_plan(self._console, config.workload.name, plan, self._folder)
        for warning in plan.warnings:
            _LOG.warning(warning)
        self._say_differences()
        self._open_sink()
        module, loader, options = self._set_up(parts, plan)
        _LOG.info("set up in %.1f s", time.monotonic() - began_s)
        self._fit(module, loader, options, parts)
        self._test(module, options, parts)
        self._ceiling(module, loader, options)

    # -- before training ------------------------------------------------------------------------------------------

    def _look_at_machine(self) -> tuple[MachineFacts, RunPlan]:
        facts = machine(torch_cuda())
        self._record.machine = _machine_entry(facts)
        device = plan_device(self._config, self._composed.choices, facts)
        faults = check_imported(self._config)
        if isinstance(device, list):
            raise ConfigError([*device, *faults])
        if faults:
            raise ConfigError(faults)
        return facts, device

    def _say_differences(self) -> None:
        """With rerun: what is not as it was then."""
        if not self._config.rerun:
            return
        earlier = read(Path(self._config.rerun))
        found = differences(earlier["config"], {**self._composed.resolved, "rerun": earlier["config"].get("rerun")})
        found += differences(earlier["machine"].get("versions"), self._record.machine["versions"], "versions")
        found += differences(earlier["git"], self._record.git, "git") if self._record.git else []
        lines = [f"{name}: {old} -> {new}" for name, old, new in found if name != "git.diff"]
        self._console.print(
            f"Differs from {self._config.rerun}:" if lines else f"Nothing differs from {self._config.rerun}."
        )
        for line in lines:
            self._console.print(f"  {line}", markup=False)

    def _open_sink(self) -> None:
        logger = self._config.logger
        mode = tracking_wandb.decide_mode(logger.mode.value)
        if self._rank > 0 or mode == "disabled":
            return
        earlier = (self._record.wandb or {}).get("id")
        try:
            sink = tracking_wandb.open_run(
                self._folder,
                mode=mode,
                project=logger.project,
                entity=logger.entity,
                group=logger.group,
                name=self._record.run_id,
                run_id=earlier,
                config=self._composed.resolved,
            )
        except RuntimeError as error:
            _LOG.warning("%s; the files have every figure.", error)
            self._journal.event("logger_lost", 0, message=str(error))
            return
        self._journal.sink = sink
        parts = [*(self._record.wandb or {}).get("parts", []), str(sink.folder)]
        self._record.wandb = {"id": sink.id, "mode": sink.mode, "path": str(sink.folder), "parts": parts}

    def _set_up(self, parts: assemble.Parts, plan: RunPlan) -> tuple[StepModule, Any, lit.TrainerOptions]:
        config = self._config
        options = lit.TrainerOptions(
            accelerator=plan["trainer.accelerator"],
            devices=plan["trainer.devices"],
            strategy=plan["trainer.strategy"],
            precision=plan["gpu.precision"],
            max_epochs=config.trainer.max_epochs,
            max_steps=config.trainer.max_steps,
            max_time_s=config.trainer.max_time_s,
            gradient_clip=config.trainer.gradient_clip,
            validate_every_steps=config.trainer.validate_every_steps,
            deterministic=config.trainer.deterministic,
            tf32=plan["gpu.tf32"],
            cudnn_benchmark=config.gpu.cudnn_benchmark,
        )
        lit.set_backend_flags(options)
        if plan.cap and plan.budget_gib is not None:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, plan.budget_gib / gib(total)))
        if config.gpu.channels_last:
            parts.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if plan["memory.checkpoint_activations"] and checkpoint_blocks(parts.model) == 0:
            _LOG.warning(
                "memory.checkpoint_activations=true has no effect: the model has no nn.ModuleList or nn.Sequential."
            )
        loader = assemble.make_train_loader(config, plan, parts.data, rank=self._rank)
        schedule = lit.Schedule(
            config.workload.schedule.name.value,
            config.workload.schedule.warmup_steps,
            config.workload.schedule.min_lr_frac,
            lit.total_steps(options, len(loader)),
        )
        module = StepModule(
            parts.model,
            train_data=parts.data.train,
            evaluation=parts.data.evaluation,
            eval_data={"val": parts.data.val, "test": parts.data.test},
            features=parts.features,
            micro=MicroBatches(plan["memory.micro_batch"], config.memory.micro_batch_steps),
            options=StepOptions(
                seed=config.seed,
                feature_mode=plan["memory.features"],
                compile_mode=plan["gpu.compile"],
                retry_on_oom=plan["memory.on_oom"] == "retry",
                on_nan=config.trainer.on_nan.value,
            ),
            make_optimizer=lambda model: assemble.make_optimizer(config, plan, parameter_groups(model)),
            lr_factor=schedule,
            on_event=self._event,
        )
        return module, loader, options

    def _event(self, kind: str, *, step: int | None = None, **facts: Any) -> None:
        self._journal.event(kind, self._record.steps if step is None else step, **facts)

    # -- training -------------------------------------------------------------------------------------------------

    def _fit(self, module: StepModule, loader: Any, options: lit.TrainerOptions, parts: assemble.Parts) -> None:
        config, on_cuda = self._config, options.accelerator == "gpu"
        device = torch.device("cuda", 0) if on_cuda else torch.device("cpu")
        clock = StepClock(origin_s=self._journal.origin_s, new_event=lit.new_event_factory(device))
        self._clock = clock
        figures = Figures(
            self._journal.metrics,
            every=config.trainer.log_every_steps,
            stop_on_nan=config.trainer.on_nan.value == "raise",
            more=self._throughput_figures,
        )
        self._latest = figures.latest
        checkpoints = Checkpoints(
            self._folder / CHECKPOINTS,
            every_steps=config.trainer.checkpoint_every_steps,
            minutes=config.trainer.checkpoint_minutes,
            keep_last=config.trainer.keep_last,
            best_metric=config.trainer.best_metric or module.evaluation.best_metric,
            best_mode=config.trainer.best_mode.value if config.trainer.best_mode else module.evaluation.best_mode,
            metrics=figures.latest,
            on_saved=self._saved,
            on_disk_error=self._journal.disk_full,
        )
        steps = lit.total_steps(options, len(loader))
        callbacks: list[pl.Callback] = [
            Clock(clock, self._journal.steps),
            _Counter(self),
            figures,
            checkpoints,
            ProgressBar(
                self._console,
                total_steps=steps,
                latest=figures.latest,
                rate=self._recent_rate,
                unit=config.workload.sample_unit,
            ),
            StopAtStepEnd(self._stop, checkpoints.save_last),
        ]
        if config.trainer.profile_steps:
            callbacks.insert(1, Profile(self._folder / "profile.json", config.trainer.profile_steps))
        trainer = lit.make_trainer(options, callbacks, self._folder)
        val_loader = assemble.make_eval_loader(config, self._plan, parts.data, "val")
        self._rss_before = psutil.Process().memory_info().rss
        psutil.cpu_percent()
        checkpoint = self._resume_point()
        trainer.fit(
            module,
            TimedLoader(loader, clock),
            val_loader,
            ckpt_path=checkpoint,
            weights_only=None if checkpoint is None else True,
        )
        loader.close()

    def _resume_point(self) -> Path | None:
        if self._target is None:
            return None
        checkpoint = self._target.checkpoint
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)
        step = int(state["global_step"])
        if self._target.in_place:
            self._journal.cut_after(step)
        self._event("resume", step=step, checkpoint=str(checkpoint))
        return checkpoint

    def _saved(self, step: int) -> None:
        self._event("checkpoint", step=step)
        self._fill_in()
        self._journal.save()

    def _throughput_figures(self) -> Mapping[str, float]:
        summary = self._journal.summary()
        if summary is None:
            return {}
        return {"samples_per_s": summary.samples_per_s, "readiness_frac": summary.readiness_frac}

    def _recent_rate(self) -> float | None:
        rows = list(self._journal.rows)[-50:]
        total_ms = sum(row.step_ms for row in rows)
        return 1e3 * sum(row.samples for row in rows) / total_ms if total_ms else None

    # -- after training -------------------------------------------------------------------------------------------

    def _test(self, module: StepModule, options: lit.TrainerOptions, parts: assemble.Parts) -> None:
        loader = assemble.make_eval_loader(self._config, self._plan, parts.data, "test")
        if loader is None:
            return
        best = self._folder / CHECKPOINTS / BEST
        if best.exists():
            lit.load_weights(module, best)
        figures = Figures(self._journal.metrics, every=1, stop_on_nan=False)
        lit.make_trainer(options, [figures], self._folder).test(module, loader, verbose=False)
        self._latest.update(figures.latest)
        written = module.evaluation.artifacts(self._folder) if self._rank == 0 else {}
        self._record.artifacts.update({name: str(path.relative_to(self._folder)) for name, path in written.items()})

    def _ceiling(self, module: StepModule, loader: Any, options: lit.TrainerOptions) -> None:
        steps = self._config.telemetry.ceiling_steps
        if steps == 0:
            return
        summary = lit.run_ceiling(module, loader, options, steps, self._folder)
        if summary is not None:
            self._record.ceiling = {"samples_per_s": summary.samples_per_s}

    def _fill_in(self) -> None:
        """Bring the record's figures up to date."""
        summary = self._journal.summary()
        record = self._record
        if summary is not None:
            record.throughput, record.time = _throughput(summary, self._config.workload.sample_unit), _time(summary)
            record.readiness_frac = summary.readiness_frac
        record.metrics = dict(getattr(self, "_latest", {}))
        record.memory = self._memory()
        cpu_pct = psutil.cpu_percent()
        record.host = {
            "cpu_pct": cpu_pct,
            "rss_gib": gib(psutil.Process().memory_info().rss),
            "shm_gib": gib(psutil.disk_usage("/dev/shm").used) if Path("/dev/shm").exists() else None,
        }

    def _memory(self) -> dict[str, Any]:
        if not hasattr(self, "_plan"):
            return {}
        on_cuda = self._plan["trainer.accelerator"] == "gpu"
        peak = torch.cuda.max_memory_reserved() if on_cuda else _peak_rss() - self._rss_before
        return {
            "device": self._plan.device_name,
            "budget_gib": self._plan.budget_gib,
            "predicted_peak_gib": None,
            "measured_peak_gib": gib(max(0, peak)),
        }

    def _finish(self, outcome: Outcome) -> None:
        record = self._record
        record.status, record.exit_code = outcome.status, outcome.exit_code
        if outcome.kind is not None:
            record.error = {"kind": outcome.kind, "message": outcome.message, "advice": outcome.advice}
        if outcome.status == "interrupted":
            self._event("signal", message=outcome.message)
        self._fill_in()
        for name, path in {
            "report": "report.md",
            "steps": "steps.csv",
            "metrics": "metrics.csv",
            "log": "train.log",
        }.items():
            record.artifacts.setdefault(name, path)
        for name in (LAST, BEST):
            if (self._folder / CHECKPOINTS / name).exists():
                record.artifacts[name.removesuffix(".ckpt")] = f"{CHECKPOINTS}/{name}"
        self._journal.save()
        try:
            (self._folder / "report.md").write_text(to_markdown(vars(record)), encoding="utf-8")
        except OSError as error:
            self._journal.disk_full(error, record.steps)
        self._journal.sink.finish(record.metrics, outcome.exit_code)
        self._journal.save()
        if self._rank == 0:
            screen.show_end(self._console, vars(record), self._folder)

    def _tell(self, outcome: Outcome, error: BaseException) -> None:
        """What ended the run, on the terminal and in the log; the traceback only where it helps."""
        _LOG.info("ended by %s", "".join(traceback.format_exception(error)))
        if self._rank > 0 and outcome.is_expected:
            return
        if os.environ.get("HYDRA_FULL_ERROR") == "1" or not outcome.is_expected:
            traceback.print_exception(error)
        else:
            print(f"{outcome.message}\n{outcome.advice}".rstrip(), file=sys.stderr)


class _Counter(pl.Callback):
    """Keeps the record's counts."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._run._has_trained = True

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        record = self._run._record
        record.steps = trainer.global_step
        record.samples += batch.total
        record.epochs = trainer.current_epoch + (batch_idx + 1) / trainer.num_training_batches


def _machine_entry(facts: MachineFacts) -> dict[str, Any]:
    whole = facts.to_dict()
    kept = ("cpu", "cpu_quota_cores", "ram_gib", "gpus", "versions", "shm_gib", "os", "nvml_problem", "torch_problem")
    return {key: whole[key] for key in kept}


def _throughput(summary: StepSummary, unit: str) -> dict[str, Any]:
    return {
        "samples_per_s": summary.samples_per_s,
        "ci95": list(summary.ci95) if summary.ci95 else None,
        "steps": summary.steps,
        "warmup_steps": summary.warmup_steps,
        "sample_unit": unit,
    }


def _time(summary: StepSummary) -> dict[str, Any]:
    names = ("wait_frac", "copy_frac", "compute_frac", "host_frac", "step_ms_p50", "step_ms_p95")
    return {name: getattr(summary, name) for name in names}


def _peak_rss() -> int:
    """Bytes; Linux counts in KiB, macOS in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
