"""Keeps the record and the files of a run up to date: while it trains, at each checkpoint, at its end."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, Literal

from wellfed.config.compose import Composed
from wellfed.config.schema import LoggerConfig, RunConfig
from wellfed.errors import first_line
from wellfed.explain.diagnosis.ceiling_check import contradiction
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.judge import conclude
from wellfed.explain.report.write import MARKDOWN, PAGE, write_reports
from wellfed.masking import SECRET_SHOWN
from wellfed.observe.hardware.facts import MachineFacts
from wellfed.observe.loggers import lightning_loggers as loggers
from wellfed.observe.loggers import wandb_sink
from wellfed.observe.loggers.journal import Journal
from wellfed.observe.loggers.sink import Sink, Sinks
from wellfed.observe.telemetry.run_progress import Progress
from wellfed.observe.timing.wall import Wall
from wellfed.plan.run_plan import RunPlan
from wellfed.record import (
    EventKind,
    LongestWaitEntry,
    PhaseEntry,
    ProcessEntry,
    ProfileEntry,
    RunRecord,
    SynchronisationEntry,
)
from wellfed.run.ending import Outcome
from wellfed.run.folder import run_folder
from wellfed.run.folder.resume import CHECKPOINTS
from wellfed.run.gpu_monitor import MachineWatch, NodeMessage, NodeWatch, Usage
from wellfed.train.lightning.checkpoints.checkpoints import BEST, LAST
from wellfed.train.memory.remembered import MICRO_BATCH, Lowered, from_event, remember
from wellfed.units import mib

_LOG = logging.getLogger(__name__)
PROFILE = "profile/trace.json"
_ARTIFACTS = {
    "report": MARKDOWN,
    "page": PAGE,
    "steps": "steps.csv",
    "metrics": "metrics.csv",
    "telemetry": "telemetry.csv",
    "log": "train.log",
    "last": f"{CHECKPOINTS}/{LAST}",
    "best": f"{CHECKPOINTS}/{BEST}",
    "profile": PROFILE,
}


class Bookkeeper:
    """Writes down what the stages of a run tell it.

    Args:
        earlier_s: seconds that earlier parts of a resumed run took, and this one before now.
    """

    def __init__(self, record: RunRecord, folder: Path, config: RunConfig, *, earlier_s: float = 0.0) -> None:
        self.record, self.folder, self._config = record, folder, config
        self.journal = Journal(record, folder, earlier_s=earlier_s)
        self._passed_at_s = record.duration_s
        self.progress = Progress(time_s=self.journal.time_s)
        self.wall = Wall()
        self.progress.around = self.wall.during
        self._wall_before = record.wall
        self.loggers: list[Any] = []
        """Of Lightning, for its Trainers: those that were chosen, once they are open."""
        self.bad_sample: dict[str, Any] = {}
        """Facts of the sample whose values ended the training."""
        self._phases_before = record.phases
        self._resumed_at: int | None = None
        self._usage: Usage | None = None
        self._watch: MachineWatch | None = None
        self._plan: RunPlan | None = None
        self._lowered: dict[str, tuple[int, Lowered]] = {}
        """By knob what had to be lowered, and the step that was done again: it is kept once that step is done."""

    def passed(self, part: Literal["imports_s", "data_s", "plan_s"]) -> None:
        """This is done of what comes before training, and nothing else since the last."""
        now_s = self.journal.time_s()
        self.record.before_training[part] = round(now_s - self._passed_at_s, 3)
        self._passed_at_s = now_s

    def machine(self, facts: MachineFacts) -> None:
        """Where it is going to be done."""
        self.record.machine = {
            "cpu": facts.cpu,
            "cpu_quota_cores": facts.cpu_quota_cores,
            "host_cores": os.cpu_count() or 1,
            "ram_gib": facts.ram_gib,
            "shm_gib": facts.shm_gib,
            "gpus": [asdict(gpu) for gpu in facts.gpus],
            "versions": dict(facts.versions),
            "os": facts.os,
            "nvml_problem": facts.nvml_problem,
            "torch_problem": facts.torch_problem,
        }

    def other_machines(self, gpus: Sequence[dict[str, Any]]) -> None:
        """Records the GPUs of the machines that train with this one."""
        self.record.machine["gpus"] = [*self.record.machine.get("gpus", []), *gpus]

    def planned(self, plan: RunPlan) -> None:
        """What is going to be done."""
        self.record.plan, self._plan = plan.to_dict(), plan
        self.record.loading = {**self.record.loading, "has_fetch": plan.loader.has_fetch}
        if plan.loader.most_workers is not None:
            self.record.loading["most_workers"] = plan.loader.most_workers
        if plan.loader.build_ms is not None and plan.loader.num_workers:
            self.record.loading["build_ms_alone"] = plan.loader.build_ms
        self.journal.save()

    def event(self, kind: EventKind, step: int | None = None, **facts: Any) -> None:
        """Something happened in training, as for `Journal.event`. What had to be lowered is kept for the next run, too.

        Not a micro-batch that was typed: it will be typed again, and says nothing of a planned one.
        """
        self.journal.event(kind, step, **facts)
        plan = self._plan
        found = from_event(kind, facts, on=date.today(), run=self.record.run_id)
        if found is None or plan is None or plan.remembered_in is None:
            return
        knob, lowered = found
        if knob != MICRO_BATCH or plan.memory.reasons["micro_batch"].source != "set":
            self._lowered[knob] = self.record.steps if step is None else step, lowered

    def _remember(self) -> None:
        """Keep what has helped."""
        file = None if self._plan is None else self._plan.remembered_in
        for knob, (step, lowered) in list(self._lowered.items()):
            if file is None or step > self.record.steps:
                continue
            del self._lowered[knob]
            try:
                remember(file, knob, lowered)
            except OSError as error:
                _LOG.warning("%s is not remembered: %s can't be written (%s).", knob, file, error.strerror)

    def go_on_after(self, step: int, epochs: float, *, in_place: bool) -> None:
        """A checkpoint is gone on from: in its own folder the tables are put back to where it was written."""
        self.record.steps, self.record.epochs = step, epochs
        if in_place:
            self._resumed_at = step
            self.journal.cut_after(step)
            self.record.samples = self.journal.samples_written()

    def restarted_at(self, step: int, epochs: float, began_s: float) -> None:
        """Training goes on after this step again: what was written of later ones is taken back, on disk too.

        Args:
            began_s: when training began in this process, by the run's clock: what it goes on from may be older.
        """
        record = self.record
        saved_s = [one["time_s"] for one in record.events if (one["kind"], one["step"]) == ("checkpoint", step)]
        self.progress.step, record.steps, record.epochs = step, step, epochs
        self.journal.rewind(step, max([began_s, *saved_s]))
        record.samples = self.journal.samples_written()

    def open_loggers(self, composed: Composed[RunConfig], plan: RunPlan) -> None:
        """Hand figures to what the group ``logger`` names too; without them the files have all."""
        config, sinks = plan.filled_in(composed.resolved), []
        for name in chosen_loggers(self._config.logger, composed.choices.get("logger", "")):
            on_lost = partial(self._logger_lost, name)
            try:
                sinks.append(
                    self._open_wandb(config, on_lost) if name == "wandb" else self._open(name, config, on_lost)
                )
            except Exception as error:  # noqa: BLE001  a dead logger must not kill a run
                text = first_line(error)
                message = text if text.startswith(name) else f"{name} can't be started: {text}"
                _LOG.warning("%s; the files have every figure.", message)
                on_lost(message)
        self.journal.sink = Sinks(sinks)

    def _logger_lost(self, name: str, message: str) -> None:
        self.journal.event("logger_lost", logger=name, message=message)

    def _open(self, name: str, config: dict[str, Any], on_lost: Callable[[str], None]) -> Sink:
        record, folder, is_new = self.record, self.folder, self._resumed_at is None
        if name == "tensorboard":
            logger = loggers.open_tensorboard(folder, resumed_at=self._resumed_at)
        elif name == "csv":
            logger = loggers.open_csv(folder)
        else:
            store = Path(self._config.paths.log_dir).resolve() / "mlruns"
            asked = self._config.logger.mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"file:{store}"
            uri, run_id = (record.mlflow["uri"], record.mlflow["run_id"]) if record.mlflow else (asked, None)
            if SECRET_SHOWN in uri:  # recorded without its password
                uri = asked
            project = self._config.logger.project
            logger = loggers.open_mlflow(uri, experiment=project, name=record.run_id, run_id=run_id)
            is_new, record.mlflow = run_id is None, {"run_id": logger.run_id, "uri": uri}
        logger.begin(config, is_new=is_new)
        self.loggers.append(logger)
        return loggers.LoggerSink(name, logger, lambda: record.steps, on_lost)

    def _open_wandb(self, config: dict[str, Any], on_lost: Callable[[str], None]) -> Sink:
        logger, earlier = self._config.logger, self.record.wandb
        sink = wandb_sink.open_run(
            self.folder,
            mode=wandb_sink.decide_mode(logger.mode.value),
            project=logger.project,
            entity=logger.entity,
            group=logger.group,
            name=self.record.run_id,
            run_id=earlier["id"] if earlier else None,
            config=config,
            on_lost=on_lost,
        )
        parts = [*(earlier["parts"] if earlier else []), str(sink.folder)]
        self.record.wandb = {"id": sink.id, "mode": sink.mode, "path": str(sink.folder), "parts": parts}
        self.loggers.append(loggers.of_wandb(sink.run, config, self.folder))
        return sink

    def watching(self, facts: MachineFacts, plan: RunPlan) -> AbstractContextManager[Any]:
        """Machine and GPUs are watched within, where telemetry is asked for."""
        self.progress.step = self.record.steps
        if not self._config.telemetry.enabled:
            return nullcontext()
        self._watch = MachineWatch(self._config.telemetry, facts, plan, self.journal, self.progress)
        return self._watch

    def watched_from_afar(
        self, facts: MachineFacts, plan: RunPlan, node: int, tell: Callable[[NodeMessage], None]
    ) -> AbstractContextManager[Any]:
        """The same of another node, whose rank tells what it reads to rank 0, which hands it to `hear_of_node`."""
        self.progress.step = self.record.steps
        if not self._config.telemetry.enabled:
            return nullcontext()
        return NodeWatch(self._config.telemetry, facts, plan, self.progress, node, tell)

    def hear_of_node(self, told: NodeMessage) -> None:
        """What was read on another node."""
        if self._watch is not None:
            self._watch.hear(told)

    def training(self, plan: RunPlan, ballast_bytes: int) -> Usage:
        """What training takes is measured from now on, until it is told to stop."""
        self._usage = Usage(plan, ballast_bytes)
        return self._usage

    def first_batch(self, by_dtype: Mapping[str, int]) -> None:
        """Records the bytes in the tensors of the first batch of training, by dtype."""
        if num_bytes := sum(by_dtype.values()):
            sizes = {name: mib(size) for name, size in by_dtype.items()}
            self.record.loading = {**self.record.loading, "batch_mib": mib(num_bytes), "batch_dtypes": sizes}

    def computed(self, found: ProcessEntry) -> None:
        """Records how the training process has computed."""
        self.record.process = found

    def waited(self, of_ranks: Sequence[LongestWaitEntry]) -> None:
        """How long each rank has stood waiting for data. All else in the record is rank 0's."""
        longest = max(of_ranks, key=lambda one: one["wait_frac"], default=None)
        if longest is not None and longest["rank"] > 0:
            self.record.loading = {**self.record.loading, "longest_wait": longest}

    def synchronised(self, places: list[SynchronisationEntry]) -> None:
        """These lines made the host wait for the device."""
        self.record.synchronisations = places

    def profiled(self, found: ProfileEntry) -> None:
        """What the profiled steps spent their time on."""
        self.record.profile = found

    def stepped(self, steps: int, epochs: float, samples: int) -> None:
        """Training has come so far; ``samples`` are those of this step."""
        self.record.steps, self.record.epochs = steps, epochs
        self.record.samples += samples
        if self._lowered:
            self._remember()

    def ceiling(self, samples_per_s: float | None) -> None:
        """The rate without loading, where it could be told."""
        if samples_per_s is not None:
            self.record.ceiling = {"samples_per_s": samples_per_s}

    def saved(self, step: int, name: str, metrics: Mapping[str, float]) -> None:
        """A checkpoint was written."""
        self.journal.event("checkpoint", step=step, file=name)
        self._fill_in(metrics)
        self.journal.save()

    def finish(self, outcome: Outcome, metrics: Mapping[str, float], *, has_page: bool = True) -> None:
        """The run is over: record, reports and sink are completed.

        Args:
            has_page: whether report.html is drawn, which takes a second.
        """
        record = self.record
        record.status, record.exit_code = outcome.status, outcome.exit_code
        if outcome.kind is not None:
            record.error = {"kind": outcome.kind, "message": outcome.message, "advice": outcome.advice}
        if outcome.status == "interrupted":
            self.journal.event("signal", message=outcome.message, advice=outcome.advice)
        if outcome.by_non_finite_loss:
            self.journal.event("nan", action="raise", **self.bad_sample)
        self._fill_in(metrics)
        run_folder.release(self.folder)
        doubt = contradiction(record)
        if doubt is not None:
            self.journal.event("ceiling_doubtful", slower=doubt.slower, data_frac=round(doubt.data_frac, 4))
        self.journal.save()
        self._judge(has_page=has_page)
        record.artifacts.update({name: path for name, path in _ARTIFACTS.items() if (self.folder / path).exists()})
        findings = record.findings
        rows = [[one["id"], one["severity"], one["message"], " ".join(one["change"])] for one in findings]
        self.journal.sink.table("findings", ("id", "severity", "message", "change"), rows)
        page = self.folder / PAGE
        if page.exists():
            self.journal.sink.page("report", page)
        self.journal.sink.finish({**record.metrics, **_of_the_run(record)}, outcome.exit_code)
        self.journal.save(duration_s=record.duration_s)  # as the reports have it

    def _judge(self, *, has_page: bool) -> None:
        """What the run's figures mean, in the record and in the reports."""
        evidence = Evidence(self.record)
        try:
            evidence = Evidence.of(self.record, self.folder)
            conclude(evidence)
            self.record.swing, self.record.findings = evidence.record.swing, evidence.record.findings
        except Exception:  # noqa: BLE001  what was trained must not be lost to what is said of it
            _LOG.exception("Where the time went could not be judged; the record has the figures.")
        try:
            write_reports(evidence, self.folder, has_page=has_page)
        except OSError as error:
            self.journal.disk_full(error, self.record.steps)
        except Exception as error:  # noqa: BLE001  as above
            _LOG.warning("%s could not be drawn: %s. %s has its words.", PAGE, first_line(error), MARKDOWN)
            _LOG.info("drawing it", exc_info=True)

    def _fill_in(self, metrics: Mapping[str, float]) -> None:
        """Bring the record's figures up to date."""
        record = self.record
        summary = self.journal.summary()
        if summary is not None:  # rates count all ranks
            record.throughput = summary.throughput(self._config.workload.sample_unit)
            record.time = summary.time()
            record.readiness_frac = summary.readiness_frac
            record.loading = {**record.loading, **summary.loading()}
        record.phases = {**self._phases_before, **self._phases()}
        record.wall = self.wall.entry(self._wall_before)
        record.metrics = {**record.metrics, **metrics}
        if self._usage is not None:
            record.memory, record.host = self._usage.entries()
            record.host["core_wait_frac"] = self.wall.core_wait_frac
        if self._watch is not None:
            record.gpus = self._watch.gpus()
            record.telemetry = self._watch.cost()

    def _phases(self) -> dict[str, PhaseEntry]:
        """Time in each phase, with that of the earlier parts of a resumed run."""
        none: PhaseEntry = {"total_s": 0.0, "times": 0}
        found: dict[str, PhaseEntry] = {}
        for phase, (total_s, times) in self.progress.spent().items():
            before = self._phases_before.get(phase, none)
            found[phase] = {"total_s": round(before["total_s"] + total_s, 6), "times": before["times"] + times}
        return found


def chosen_loggers(logger: LoggerConfig, typed: str) -> list[str]:
    """Their names, in the order in which ``logger=[..]`` was ``typed``."""
    names = ["wandb"] if wandb_sink.decide_mode(logger.mode.value) != "disabled" else []
    names += [name for name in ("tensorboard", "mlflow", "csv") if getattr(logger, name)]
    order = re.findall(r"\w+", typed)
    return sorted(names, key=lambda name: order.index(name) if name in order else len(order))


def _of_the_run(record: RunRecord) -> dict[str, float]:
    """Figures of the whole run, for a logger's summary; what was not measured is left out."""
    throughput, ceiling = record.throughput, record.ceiling
    rate, top = throughput and throughput["samples_per_s"], ceiling and ceiling["samples_per_s"]
    found: dict[str, Any] = {
        "throughput/samples_per_s": rate,
        "throughput/readiness_frac": record.readiness_frac,
        "ceiling/samples_per_s": top,
        "ceiling/headroom": max(0.0, top / rate - 1) if rate and top else None,
        "memory/peak_gib": record.memory.get("measured_peak_gib"),
        **{
            f"gpu{gpu}/util_{figure}_pct": figures.get("util_pct", {}).get(figure)
            for gpu, figures in record.gpus.items()
            for figure in ("mean", "p5", "p95")
        },
        **{f"step/{name}": share for name, share in (record.time or {}).items()},
    }
    return {name: float(value) for name, value in found.items() if value is not None}
