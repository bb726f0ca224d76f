"""Keeps the record and the files of a run up to date: during training, at each checkpoint, at its end."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

from wellfed.config.compose import Composed
from wellfed.config.schema import RunConfig
from wellfed.explain.diagnosis.ceiling_check import contradiction
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_tables import gpu_figures
from wellfed.observe.loggers.journal import Journal
from wellfed.observe.loggers.sink import Sink
from wellfed.observe.machine_facts import MachineFacts
from wellfed.observe.telemetry.run_progress import Progress
from wellfed.observe.telemetry.sampler import Sampler
from wellfed.observe.telemetry.series import Sample
from wellfed.observe.timing.wall import Wall
from wellfed.plan.run_plan import RunPlan
from wellfed.record.entries import PhaseEntry, RankEntry, RunRecord
from wellfed.run.closing import diagnosed, figures_of_run, publish
from wellfed.run.folder import run_folder
from wellfed.run.gpu_monitor import Usage
from wellfed.run.outcome import Outcome
from wellfed.run.run_loggers import LoggerOpener
from wellfed.units import mib

_LOG = logging.getLogger(__name__)
FIGURES_FRAC = 0.02
"""Largest share of a run's time that computing its figures at checkpoints may take."""
_KEPT_READINGS = 2000
"""Number of readings that the screen of a run sees, of all GPUs and hosts together."""


class Bookkeeper:
    """Record, files and loggers of a run, which its stages write.

    Args:
        earlier_s: seconds of earlier processes of a resumed run, and of this one so far.
    """

    def __init__(self, record: RunRecord, folder: Path, config: RunConfig, *, earlier_s: float = 0.0) -> None:
        self.record, self.folder, self._config = record, folder, config
        self.journal = Journal(record, folder, earlier_s=earlier_s)
        self._passed_at_s = record.duration_s
        self.progress = Progress(time_s=self.journal.time_s)
        self.wall = Wall()
        self.progress.around = self.wall.during
        self._wall_before = record.wall
        self.opener = LoggerOpener(config, record, folder, self.journal.event)
        self.loggers: list[Any] = []
        """Lightning's loggers for Trainers, once they are open."""
        self.bad_sample: dict[str, Any] = {}
        """Facts of the sample with a non-finite value that ended the training."""
        self.evidence = Evidence(record)
        """Record and tables; complete once the run is finished."""
        self._phases_before, self._ceiling_before = record.phases, record.ceiling
        self._usage: Usage | None = None
        self.readings: deque[Sample] = deque(maxlen=_KEPT_READINGS)
        """Latest readings of telemetry, the oldest first."""
        self._sampler: Sampler | None = None
        self._figures_due_s = 0.0
        """Time of the run from which a checkpoint computes the figures of all steps again."""

    def passed(self, part: Literal["imports_s", "data_s", "plan_s"]) -> None:
        """Records the time of a part of the start-up, since the previous part."""
        now_s = self.journal.time_s()
        self.record.before_training[part] = round(now_s - self._passed_at_s, 3)
        self._passed_at_s = now_s

    def planned(self, plan: RunPlan, *, saves: bool = True) -> None:
        """Records the plan, and writes the record unless a resume may still be refused."""
        self.record.plan = plan.to_dict()
        self.record.refused = list(plan.refused)
        loading = self.record.loading = {**self.record.loading, "has_fetch": plan.loader.has_fetch}
        if plan.loader.most_workers is not None:
            loading["most_workers"] = plan.loader.most_workers
        if plan.loader.build_ms is not None and plan.loader.num_workers:
            loading["build_ms_alone"] = plan.loader.build_ms
        if saves:
            self.journal.save()

    def resumed_after(self, step: int, epochs: float, *, in_place: bool) -> None:
        """Records a resume. In the run's own folder it also cuts the tables back to the checkpoint."""
        self.record.steps, self.record.epochs = step, epochs
        self.record.ranks = []  # of an earlier attempt, which may have been others
        if in_place:
            self.opener.resumed_at = step
            self.journal.cut_after(step)
            self.record.samples = self.journal.samples_written()

    def open_loggers(self, composed: Composed[RunConfig], plan: RunPlan) -> None:
        """Opens the chosen loggers. If one fails, the files still have every metric."""
        sinks, self.loggers = self.opener.open(plan.filled_in(composed.resolved))
        self.journal.sink = Sink(*sinks)
        if sinks and self.opener.resumed_at is None:
            self.journal.save()  # a resumed run continues theirs by the ids in the record

    def watching(self, facts: MachineFacts, plan: RunPlan) -> AbstractContextManager[Any]:
        """Returns a context that watches machine and GPUs, if telemetry is enabled."""
        self.progress.step, config = self.record.steps, self._config.telemetry
        if not config.enabled:
            return nullcontext()
        self._sampler = Sampler(
            self._take,
            lambda kind, **facts: self.journal.event(kind, self.progress.step, **facts),
            self.journal.publish,
            interval_s=config.interval_s,
            progress=self.progress,
            time_s=self.journal.time_s,
        )
        failed = [f"NVML: {facts.nvml_problem}. GPU figures are absent."] if facts.nvml_failed else []
        gpus = [gpu for gpu in facts.gpus if not plan.on_gpu or gpu.index < plan.trainer.devices]
        self._sampler.watch(gpus, refused=[*failed, *facts.cards_left_out])
        return self._sampler

    def _take(self, samples: Sequence[Sample]) -> None:
        self.journal.telemetry(samples)
        self.readings.extend(samples)

    @property
    def peak_gib(self) -> float | None:
        """Peak of this rank's memory in training, as in the record; None before training."""
        return None if self._usage is None else self._usage.entries()[0]["measured_peak_gib"]

    def training(self, plan: RunPlan) -> Usage:
        """Measures the memory of training from now on, until it is stopped."""
        self._usage = Usage(plan)
        return self._usage

    def first_batch(self, by_dtype: Mapping[str, int]) -> None:
        """Records the bytes of the first training batch, by dtype."""
        if num_bytes := sum(by_dtype.values()):
            self.record.loading = {**self.record.loading, "batch_mib": mib(num_bytes)}

    def of_ranks(self, ranks: Sequence[RankEntry]) -> None:
        """Records the figures of all ranks."""
        self.record.ranks = list(ranks)

    def stepped(self, steps: int, epochs: float, samples: int) -> None:
        """Records the progress of training; ``samples`` are those of this step."""
        self.progress.step_done(steps)
        self.record.steps, self.record.epochs = steps, epochs
        self.record.samples += samples

    def ceiling(self, samples_per_s: float | None) -> None:
        """Records the rate without loading, if it was measured."""
        if samples_per_s is not None:
            self.record.ceiling = {"samples_per_s": samples_per_s}

    def saved(self, step: int, name: str, metrics: Mapping[str, float]) -> None:
        """Records a written checkpoint, and updates the record.

        Figures of all steps stay as they are if computing them would exceed `FIGURES_FRAC`.
        """
        self.journal.event("checkpoint", step=step, file=name)
        began_s = self.journal.time_s()
        if began_s >= self._figures_due_s:
            self._fill_in_figures()
            ended_s = self.journal.time_s()
            self._figures_due_s = ended_s + (ended_s - began_s) / FIGURES_FRAC
        self._fill_in(metrics)
        self.journal.save()

    def ended(self, outcome: Outcome) -> None:
        """Notes how the run has ended."""
        record = self.record
        record.status, record.exit_code = outcome.status, outcome.exit_code
        if outcome.kind is not None:
            record.error = {"kind": outcome.kind, "message": outcome.message, "advice": outcome.advice}

    def finish(self, outcome: Outcome, metrics: Mapping[str, float], *, has_page: bool = True) -> None:
        """Completes record, reports and loggers of a finished run.

        Args:
            has_page: whether report.html is drawn.
        """
        record = self.record
        self.ended(outcome)
        if outcome.status == "interrupted":
            self.journal.event("signal", message=outcome.message, advice=outcome.advice)
        if outcome.by_non_finite_loss:
            self.journal.event("nan", action="raise", **self.bad_sample)
        self._fill_in_figures()
        self._fill_in(metrics)
        run_folder.release(self.folder)
        doubt = contradiction(record)
        if doubt is not None:
            self.journal.event("ceiling_doubtful", slower=doubt.slower, data_frac=round(doubt.data_frac, 4))
        self.journal.save()
        self.evidence = diagnosed(self.journal, has_page=has_page)
        publish(self.journal)
        self.journal.sink.finish({**record.metrics, **figures_of_run(record)}, outcome.exit_code)
        self.journal.save(duration_s=record.duration_s)  # the same duration as in the reports

    def _fill_in_figures(self) -> None:
        """Computes the figures of all steps and of all readings of the GPUs."""
        record, summary = self.record, self.journal.summary()
        if summary is not None:  # rates are over all ranks
            if record.ceiling is self._ceiling_before:  # an earlier process of a resumed run measured it
                record.ceiling = None
            record.throughput = summary.throughput(self._config.workload.sample_unit)
            record.time = summary.time
            record.readiness_frac = summary.readiness_frac
            record.loading = {**record.loading, **summary.loading}
        if self._sampler is not None:
            record.gpus = gpu_figures(self.folder, record.samples)

    def _fill_in(self, metrics: Mapping[str, float]) -> None:
        record = self.record
        record.phases = self._phases()
        record.wall = self.wall.entry(self._wall_before)
        record.metrics = {**record.metrics, **metrics}
        if self._usage is not None:
            try:
                record.memory, record.host = self._usage.entries()
                record.host["core_wait_frac"] = self.wall.core_wait_frac
            except OSError as error:  # no file handle is left, for example
                _LOG.warning("The use of memory and CPU could not be read: %s.", error)
        if self._sampler is not None:
            interval_s = self._config.telemetry.interval_s
            record.telemetry = {"interval_s": interval_s, "cpu_frac": self._sampler.cpu_frac()}

    def _phases(self) -> dict[str, PhaseEntry]:
        """Returns the time in each phase, including earlier processes of a resumed run."""
        found = dict(self._phases_before)
        for phase, (total_s, times) in self.progress.spent().items():
            before = found.get(phase, {"total_s": 0.0, "times": 0})
            found[phase] = {"total_s": round(before["total_s"] + total_s, 6), "times": before["times"] + times}
        return found
