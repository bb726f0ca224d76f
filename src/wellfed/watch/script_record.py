"""Keeps the run folder of a watched script: record, tables, readings of the machine, pages."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from wellfed import __version__
from wellfed.batches import batch_size, bytes_by_dtype
from wellfed.errors import first_line
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.gains.pauses import are_of_epochs
from wellfed.explain.diagnosis.run_tables import gpu_figures
from wellfed.explain.diagnosis.thresholds import FEWEST_PAUSES
from wellfed.explain.report.text_table import PIPED_COLUMNS
from wellfed.masking import masked_command
from wellfed.observe.hardware.detect import machine
from wellfed.observe.loggers.journal import Journal
from wellfed.observe.telemetry.host import spent_cpu_s
from wellfed.observe.telemetry.run_progress import Progress
from wellfed.observe.telemetry.sampler import Sampler
from wellfed.observe.telemetry.series import HOST, Phase, Sample
from wellfed.observe.timing.readiness import Rows, StepTable
from wellfed.observe.timing.step_clock import StepRow
from wellfed.record.entries import EventKind, PlanEntry, RankEntry, RunRecord
from wellfed.record.provenance import git_state
from wellfed.run import screen
from wellfed.run.closing import diagnosed, publish
from wellfed.run.folder import run_folder
from wellfed.units import gib, mib
from wellfed.watch.loop_watch import INTERVAL_S
from wellfed.watch.ranks_of_script import RankOfScript, TorchrunStore, unknown_ranks
from wellfed.watch.script_process import Script, ScriptEnd

_FOLDER = "watch"
"""Folder of all watched scripts below the log dir."""
_FEWEST_STEPS = 2
"""Steps after which the record on disk has the settings of the script's loader."""
_SETTINGS = ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory")


class SeenLoader:
    """Settings of a DataLoader of the script, which itself may be gone while its iterator is in use."""

    def __init__(self, loader: Any) -> None:
        self.settings = {name: getattr(loader, name, None) for name in _SETTINGS}
        self.batch_size = getattr(loader, "batch_size", None)
        self.is_iterable = bool(getattr(loader, "_dataset_kind", 0))
        """It reads an IterableDataset, of which each worker has a copy."""
        self.is_trained = self.is_aside = False
        """A backward pass has followed a batch; none has followed one that was followed by another batch."""
        self.epoch = -1
        self.samples = 0
        """Samples that were trained on."""


class ScriptRecord(RankOfScript):
    """Record and files of one script on its first rank, from the first sign of a training on.

    Args:
        origin_s: monotonic time of the script's start.
        store: where the other ranks leave their figures; None = there are none, or they can't be seen.
        interval_s: seconds between readings of GPUs and host.
        receive: gets the readings, too, in another thread.
        all_gpus: whether GPUs are read on which torch holds no memory in this process.
    """

    def __init__(
        self,
        script: Script,
        log_dir: Path,
        *,
        origin_s: float,
        store: TorchrunStore | None = None,
        interval_s: float = INTERVAL_S,
        receive: Callable[[Sequence[Sample]], None] = lambda samples: None,
        all_gpus: bool = False,
    ) -> None:
        super().__init__(origin_s=origin_s, store=store)
        self.script, self._log_dir, self._interval_s = script, log_dir, interval_s
        self._receive, self._all_gpus = receive, all_gpus
        self._notes: list[str] = []
        self.folder: Path | None = None
        self._seen: SeenLoader | None = None
        """The DataLoader that most samples of training came from."""
        self._watching = ExitStack()
        self._gpus: set[int] = set()
        """Numbers of the GPUs that the training uses. Readings of others are dropped."""

    def begin(self) -> None:
        """Makes the folder and starts reading the machine, once."""
        if self.is_open:
            return
        # The script may make its workers warnings into errors, as of a fork beside our threads.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded, use of fork", DeprecationWarning)
        folder, launch = run_folder.create(self._log_dir, _FOLDER), None if self.store is None else self.store.launch
        self.folder = folder.path.absolute()  # the script may change its working folder
        self.record = replace(
            RunRecord.start(self.folder.name),
            epochs=None,
            workload=Path(self.script.name).name,
            overrides=masked_command(self.script.arguments),
            git=git_state(Path.cwd()),
            launch=None if launch is None else {"by": "torchrun", "job": launch.job, "attempt": launch.attempt},
            engine={"version": __version__, "commit": None, "dirty": False, "within_project": False},
            config={"script": self.script.name, "workload": {"sample_unit": "steps"}},
        )
        self.journal = Journal(self.record, self.folder)
        self.journal.origin_s = self.origin_s
        self.progress = Progress(time_s=self.journal.time_s)
        facts = machine()  # NVML alone: listing torch's devices would start CUDA
        self.record.machine = facts.entry()
        self.record.before_training["imports_s"] = round(self.journal.time_s(), 3)
        self.journal.save()
        self._sampler = Sampler(
            self._read, self._event, interval_s=self._interval_s, progress=self.progress, time_s=self.journal.time_s
        )
        failed = [f"NVML: {facts.nvml_problem}. GPU figures are absent."] if facts.nvml_failed else []
        self._sampler.watch(facts.gpus, refused=[*failed, *facts.cards_left_out])
        self._watching.enter_context(self._sampler)
        self._cpu_before_s, self._began_s = spent_cpu_s(), self.journal.time_s()
        self.is_open = True
        self._begin_figures()
        for text in self._notes:
            self.note(text)

    # What the steps report

    def note(self, text: str) -> None:
        """Records once that something could not be seen."""
        if not self.is_open:
            self._notes.append(text)
        elif not any(event.get("message") == text for event in self.record.events):
            self.journal.event("unseen", message=text)

    def enter(self, phase: Phase) -> None:
        """Enters a phase of the training, unless it is in it."""
        if self.progress.phase != phase:
            self.progress.enter(phase)

    def checkpoint_begins(self, *, is_more: bool) -> None:
        """Marks that the script writes a file with torch.save, which may belong to the latest checkpoint."""
        if not is_more:
            self.journal.event("checkpoint", file="torch.save")
        self.progress.enter("checkpoint", is_more=is_more)

    def received(self, batch: Any, samples: int) -> None:
        """Records the bytes of the first batch of training."""
        if "batch_mib" not in self.record.loading:
            self.record.loading = {**self.record.loading, "batch_mib": mib(sum(bytes_by_dtype(batch).values()))}

    def epochs(self, done: int) -> None:
        """Records how many passes over the training's DataLoaders have ended. Without one the number is unknown."""
        self.record.epochs = float(done)

    def trained_with(self, loader: SeenLoader, samples: int) -> None:
        """Counts samples of a DataLoader that were trained on."""
        loader.samples += samples
        if loader.settings["num_workers"] is None:  # anything that can be iterated over
            return
        if self._seen is None or loader.samples >= self._seen.samples:
            self._seen = loader

    def model(self, config: Mapping[str, Any], values: int) -> None:
        """Records how the script computes, and how many values its optimizer trains."""
        super().model(config, values)
        self._add_config(config)
        self.record.process = {"parameter_values": values}

    def _add_config(self, config: Mapping[str, Any]) -> None:
        trainer = {**self.record.config.get("trainer", {}), **config.get("trainer", {})}
        self.record.config = {**self.record.config, **config, **({"trainer": trainer} if trainer else {})}

    def data_parallel(self, module: str, devices: int) -> None:
        """Records that one process drives several GPUs."""
        self.journal.event("data_parallel", module=module, devices=devices)

    def steps(self, rows: Sequence[StepRow], ranks: int = 1) -> bool:
        """Writes finished steps. Returns whether that has taken long, so that the time belongs to no step.

        Args:
            ranks: number of processes that train together, as if each had as many samples.
        """
        is_long, before = super().steps(rows, ranks), self.record.steps
        rows = [row._replace(samples=self.world_size * row.samples) for row in rows]
        self.record.steps = rows[-1].step
        self.record.samples += sum(row.samples for row in rows)
        self.journal.steps(rows)
        self.progress.step_done(self.record.steps)
        if before < _FEWEST_STEPS <= self.record.steps:  # a script that is killed leaves this
            self._add_settings()  # without figures, which readers then take from the tables
            self.journal.save()
            return True
        return is_long

    # Its end

    def finish(self, end: ScriptEnd) -> Evidence:
        """Completes record and pages; returns the evidence with its findings."""
        record, error = self.record, end.error
        self.stop_reading()
        duration_s = round(self.journal.time_s(), 3)
        record.status, record.exit_code = "ok" if end.exit_code == 0 else "failed", end.exit_code
        if end.is_interrupt:
            record.status = "interrupted"
        elif error is not None:
            is_oom, message = isinstance(error, torch.OutOfMemoryError), f"{type(error).__name__}: {first_line(error)}"
            record.error = {"kind": "device_oom" if is_oom else "code", "message": message, "advice": ""}
            record.status = "oom" if is_oom else "failed"
        self._fill_in()
        super().finish(end)
        if (unknown := unknown_ranks(self.world_size, self._known, self.store)) is not None:
            self.note(unknown)
        self.journal.save(duration_s=duration_s)
        evidence = diagnosed(self.journal, has_page=True)
        publish(self.journal)
        self.journal.save(duration_s=duration_s)
        return evidence

    def stop_reading(self) -> None:
        """Ends the readings; waits at most a second for one in progress."""
        self._watching.close()

    def show(self, evidence: Evidence) -> None:
        """Shows the last screen on stderr."""
        console = screen.Terminal(stderr=True, width=None if sys.stderr.isatty() else PIPED_COLUMNS)
        assert self.folder is not None
        is_below = self.folder.is_relative_to(Path.cwd())
        screen.show_end(console, evidence, self.folder.relative_to(Path.cwd()) if is_below else self.folder)

    def figures(self) -> dict[str, Any]:
        """Returns the main figures so far, as plain data."""
        assert self.folder is not None
        found, steps = self.journal.summary(), dict[str, Any](steps=0)
        if found is not None:
            rate = {"readiness_frac": found.readiness_frac, "steps_per_s": 1e3 / found.time["step_ms_mean"]}
            steps = {**found.throughput(self._unit()), **rate, **found.time}
        return {
            **steps,
            "gpus": gpu_figures(self.folder, self.record.samples),
            "findings": [one["id"] for one in self.record.findings],
            "folder": str(self.folder),
        }

    def _fill_in(self) -> None:
        record, summary = self.record, self.journal.summary()
        self._add_settings()
        assert self.folder is not None
        until_s = self.seen_s - self.origin_s
        # What the script does later is no training. A reading describes the time before it.
        self.journal.drop_readings_after(until_s + self._interval_s)
        if summary is not None:
            record.throughput, record.time = summary.throughput(self._unit()), summary.time
            record.readiness_frac = summary.readiness_frac
            record.loading = {**record.loading, **summary.loading}
        record.phases = {
            phase: {"total_s": round(total_s, 6), "times": times}
            for phase, (total_s, times) in self.progress.spent(until_s).items()
        }
        self._add_pauses()
        record.gpus = gpu_figures(self.folder, record.samples)
        record.telemetry = {"interval_s": self._interval_s, "cpu_frac": self._sampler.cpu_frac()}
        gpu = self.fullest_gpu()
        passed_s = max(1e-9, self.journal.time_s() - self._began_s)
        if (peak_gib := self.peak_gib()) is not None:
            record.memory = {
                "device": "cpu" if gpu is None else torch.cuda.get_device_name(gpu),
                "budget_gib": None if gpu is None else gib(torch.cuda.get_device_properties(gpu).total_memory),
                "predicted_peak_gib": None,
                "measured_peak_gib": peak_gib,
                "may_lower": [],
            }
        record.host = {
            "cpu_pct": 100 * (spent_cpu_s() - self._cpu_before_s) / passed_s,
            "rss_gib": gib(psutil.Process().memory_info().rss),
        }

    def _add_pauses(self) -> None:
        """Records after how many steps the script validates and saves on average, unless it does so once an epoch."""
        record = self.record
        for phase, knob in (("validate", "validate_every_steps"), ("checkpoint", "checkpoint_every_steps")):
            times = record.phases[phase]["times"] if phase in record.phases else 0
            if times >= FEWEST_PAUSES and not are_of_epochs(times, record.epochs or 0):
                every = max(1, round(record.steps / times))
                entry: PlanEntry = {"value": every, "because": "of the script, on average", "source": "set"}
                record.plan = {**record.plan, f"trainer.{knob}": entry}

    def _unit(self) -> str:
        return "steps" if self._seen is None else "samples"

    def _add_settings(self) -> None:
        if self._seen is None:
            return
        found, because = self._seen.settings, "of the script's DataLoader"
        plan: dict[str, PlanEntry] = {
            f"loader.{name}": {"value": value, "because": because, "source": "set"} for name, value in found.items()
        }
        accelerator = "cpu" if self.fullest_gpu() is None else "gpu"
        plan["trainer.accelerator"] = {"value": accelerator, "because": "of the script", "source": "set"}
        self.record.plan = plan
        workload = {"sample_unit": self._unit(), "effective_batch_size": self._effective_batch_size()}
        size, is_iterable = self._seen.batch_size, self._seen.is_iterable
        loader = {"backend": "torch", **found, "batch_size": size, "is_iterable": is_iterable}
        self.record.config = {**self.record.config, "workload": workload, "loader": loader}

    def _effective_batch_size(self) -> int | None:
        """Returns the samples of an optimizer step over all ranks; None if unknown, as of batches of many sizes."""
        size, rows = None if self._seen is None else self._seen.batch_size, StepTable.of(self.journal.rows)
        return int(np.median(rows.column("samples"))) if isinstance(size, int) and len(rows) else None

    def _rows(self) -> Rows:
        return self.journal.rows

    def _take_ranks(self, ranks: Sequence[RankEntry]) -> None:
        if self.world_size > 1:  # otherwise torchrun has started scripts that train apart
            super()._take_ranks(ranks)
            assert self.store is not None
            launch = self.store.launch
            self._add_config({"trainer": {"devices": launch.devices, "num_nodes": launch.num_nodes}})
            self.record.ranks = list(ranks)
            self.journal.save()

    def _read(self, samples: Sequence[Sample]) -> None:
        self._note_peaks()
        self._gpus |= self._peaks.keys()
        if self._gpus and self.store is not None:  # ranks use the GPUs of their numbers
            self._gpus |= {*range(self.store.launch.devices)}
        if used := [one for one in samples if one.gpu == HOST or self._all_gpus or one.gpu in self._gpus]:
            self.journal.telemetry(used)
            self._receive(used)

    def _event(self, kind: EventKind, **facts: Any) -> None:
        self.journal.event(kind, self.progress.step, **facts)


def samples_in(batch: Any, loader: SeenLoader) -> int:
    """Returns the samples of a batch; by the DataLoader's setting if the batch does not show them."""
    first = batch[0] if type(batch) in (list, tuple) and batch else batch
    if type(first) is torch.Tensor and first.ndim:  # without a visit to each tensor
        size, shape = loader.batch_size, first.shape
        return size if isinstance(size, int) and shape[0] > size else shape[0]  # sequences as [time, batch]
    try:
        return batch_size(batch)
    except Exception:  # noqa: BLE001  a batch of any type
        return loader.batch_size if isinstance(loader.batch_size, int) else 1
