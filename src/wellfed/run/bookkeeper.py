"""Keeps the record and the files of a run up to date: while it trains, at each checkpoint, at its end."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from wellfed.config.compose import Composed
from wellfed.config.schema import RunConfig
from wellfed.diagnosis.ceiling_check import contradiction
from wellfed.diagnosis.report import to_markdown
from wellfed.diagnosis.swing import find_swing
from wellfed.hardware.facts import MachineFacts
from wellfed.lit.callbacks.checkpoints import BEST, LAST
from wellfed.planning.run_plan import RunPlan
from wellfed.record import RunRecord
from wellfed.run.gpu_monitor import MachineWatch, Usage
from wellfed.run.outcome import Outcome
from wellfed.run.resume import CHECKPOINTS
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


class Bookkeeper:
    """Writes down what the stages of a run tell it.

    Args:
        earlier_s: seconds that earlier parts of a resumed run took, and this one before now.
    """

    def __init__(self, record: RunRecord, folder: Path, config: RunConfig, *, earlier_s: float = 0.0) -> None:
        self.record, self.folder, self._config = record, folder, config
        self.journal = Journal(record, folder, earlier_s=earlier_s)
        self.progress = Progress(time_s=self.journal.time_s)
        self._usage: Usage | None = None
        self._watch: MachineWatch | None = None

    def machine(self, facts: MachineFacts) -> None:
        """Where it is going to be done."""
        self.record.machine = {
            "cpu": facts.cpu,
            "cpu_quota_cores": facts.cpu_quota_cores,
            "ram_gib": facts.ram_gib,
            "shm_gib": facts.shm_gib,
            "gpus": [asdict(gpu) for gpu in facts.gpus],
            "versions": dict(facts.versions),
            "os": facts.os,
            "nvml_problem": facts.nvml_problem,
            "torch_problem": facts.torch_problem,
        }

    def planned(self, plan: RunPlan) -> None:
        """What is going to be done."""
        self.record.plan = plan.to_dict()
        self.journal.save()

    def go_on_after(self, step: int, epochs: float, *, in_place: bool) -> None:
        """A checkpoint is gone on from: in its own folder the tables are put back to where it was written."""
        self.record.steps, self.record.epochs = step, epochs
        if in_place:
            self.journal.cut_after(step)
            self.record.samples = self.journal.samples_written()

    def open_wandb(self, composed: Composed[RunConfig]) -> None:
        """Hand figures to wandb too, where it is asked for; without it the files have them all."""
        logger = self._config.logger
        mode = wandb_sink.decide_mode(logger.mode.value)
        if mode == "disabled":
            return
        earlier = self.record.wandb
        try:
            sink = wandb_sink.open_run(
                self.folder,
                mode=mode,
                project=logger.project,
                entity=logger.entity,
                group=logger.group,
                name=self.record.run_id,
                run_id=earlier["id"] if earlier else None,
                config=composed.resolved,
                on_lost=lambda message: self.journal.event("logger_lost", message=message),
            )
        except RuntimeError as error:
            _LOG.warning("%s; the files have every figure.", error)
            self.journal.event("logger_lost", message=str(error))
            return
        self.journal.sink = sink
        parts = [*(earlier["parts"] if earlier else []), str(sink.folder)]
        self.record.wandb = {"id": sink.id, "mode": sink.mode, "path": str(sink.folder), "parts": parts}

    def watching(self, facts: MachineFacts, plan: RunPlan) -> AbstractContextManager[Any]:
        """Machine and GPUs are watched within, where telemetry is asked for."""
        self.progress.step = self.record.steps
        if not self._config.telemetry.enabled:
            return nullcontext()
        self._watch = MachineWatch(self._config.telemetry, facts, plan, self.journal, self.progress)
        return self._watch

    def training(self, plan: RunPlan, ballast_bytes: int) -> Usage:
        """What training takes is measured from now on, until it is told to stop."""
        self._usage = Usage(plan, ballast_bytes)
        return self._usage

    def stepped(self, steps: int, epochs: float, samples: int) -> None:
        """Training has come so far; ``samples`` are those of this step."""
        self.record.steps, self.record.epochs = steps, epochs
        self.record.samples += samples

    def ceiling(self, samples_per_s: float | None) -> None:
        """The rate without loading, where it could be told."""
        if samples_per_s is not None:
            self.record.ceiling = {"samples_per_s": samples_per_s}

    def saved(self, step: int, name: str, metrics: Mapping[str, float]) -> None:
        """A checkpoint was written."""
        self.journal.event("checkpoint", step=step, file=name)
        self._fill_in(metrics)
        self.journal.save()

    def finish(self, outcome: Outcome, metrics: Mapping[str, float]) -> None:
        """The run is over: record, report and sink are completed."""
        record = self.record
        record.status, record.exit_code = outcome.status, outcome.exit_code
        if outcome.kind is not None:
            record.error = {"kind": outcome.kind, "message": outcome.message, "advice": outcome.advice}
        if outcome.status == "interrupted":
            self.journal.event("signal", message=outcome.message)
        self._fill_in(metrics)
        doubt = contradiction(record)
        if doubt is not None:
            self.journal.event("ceiling_doubtful", slower=doubt.slower, data_frac=round(doubt.data_frac, 4))
        self.journal.save()
        record.swing = find_swing(record, self.folder)
        record.artifacts.update({name: path for name, path in _ARTIFACTS.items() if (self.folder / path).exists()})
        record.artifacts["report"] = "report.md"
        try:
            report = to_markdown(record)  # a path may hold what is no UTF-8
            (self.folder / "report.md").write_text(report, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            self.journal.disk_full(error, record.steps)
        self.journal.sink.finish(record.metrics, outcome.exit_code)
        self.journal.save()

    def _fill_in(self, metrics: Mapping[str, float]) -> None:
        """Bring the record's figures up to date."""
        record = self.record
        summary = self.journal.summary()
        if summary is not None:  # rates count all ranks
            record.throughput = {
                "samples_per_s": summary.samples_per_s,
                "ci95": list(summary.ci95) if summary.ci95 else None,
                "steps": summary.steps,
                "warmup_steps": summary.warmup_steps,
                "sample_unit": self._config.workload.sample_unit,
            }
            record.time = {
                "wait_frac": summary.wait_frac,
                "copy_frac": summary.copy_frac,
                "compute_frac": summary.compute_frac,
                "host_frac": summary.host_frac,
                "step_ms_p50": summary.step_ms_p50,
                "step_ms_p95": summary.step_ms_p95,
            }
            record.readiness_frac = summary.readiness_frac
        record.metrics = {**record.metrics, **metrics}
        if self._usage is not None:
            record.memory, record.host = self._usage.entries()
        if self._watch is not None:
            record.gpus = self._watch.gpus()
            record.telemetry = self._watch.cost()
