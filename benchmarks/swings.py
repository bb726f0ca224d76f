"""Are swings told with their period and their cause? Real loaders with planted delays, read as a run's own tables.

    python benchmarks/swings.py [--repeats 20] [--cases lockstep logging] [--jobs 4] [--out RECORD]

Each repeat is a loop as a run's: the loader with its worker processes, the step clock, the tables of a run folder. A
step and whatever is planted sleep instead of computing: a worker that builds a batch, logging, a checkpoint, a
validation, a worker that starts. Lengths vary evenly by the jitter. From the folder the swings and the findings are
read as after any run. A repeat is right where the swings that were planted, and no other, are named with the part of
the step that they are in; ``found`` counts those that name all that was planted and possibly more.
``9_to_90`` is a driver whose utilisation jumps between 9 % and 90 % with a period of 9.5 s, watched at 2 Hz: the fake
driver of the tests below the real pynvml, on a clock that is turned forward.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.measuring import write_record  # noqa: E402
from wellfed.contract import Datasets  # noqa: E402
from wellfed.data.settings import LoaderSettings  # noqa: E402
from wellfed.data.train_loader import train_loader  # noqa: E402
from wellfed.explain.diagnosis.evidence import Evidence  # noqa: E402
from wellfed.explain.diagnosis.run_rules import run_rules  # noqa: E402
from wellfed.observe.hardware.detect import machine  # noqa: E402
from wellfed.observe.loggers.journal import Journal  # noqa: E402
from wellfed.observe.telemetry.run_progress import Progress  # noqa: E402
from wellfed.observe.timing.step_clock import StepClock  # noqa: E402
from wellfed.record import RunRecord, git_state  # noqa: E402
from wellfed.sample_rng import SampleRng  # noqa: E402
from wellfed.train.lightning.callbacks.clock import WARMUP_STEPS, TimedLoader  # noqa: E402

BATCH = 4
JITTERS = (0.1, 0.4)


@dataclass(frozen=True)
class Case:
    """What is planted in a loop, and what is to be found there."""

    expected: tuple[tuple[str, str], ...]
    """The setting that implies each swing, and the part of a step that it shows in."""
    rule: str = ""
    """What says so; empty: a rule of the loader's, or none."""
    steps: int = 160
    workers: int = 3
    build_ms: float = 10.0
    step_ms: float = 12.0
    epoch_steps: int = 1000
    restart_ms: float | None = None
    """Workers end with the epoch, and a new one takes so long before its first batch."""
    log_every: int = 50
    log_ms: float = 0.0
    checkpoint_every: int | None = None
    checkpoint_ms: float = 0.0
    validate_ms: float = 0.0
    """At the end of each epoch."""
    noise: float = 0.0
    """Steps take so much longer now and then, without a period."""


CASES = {
    "lockstep": Case((("loader.num_workers", "wait"),), workers=4, build_ms=100.0, step_ms=8.0),
    "restart": Case((("epoch", "wait"),), "restarted_workers", epoch_steps=20, restart_ms=150.0),
    "logging": Case((("trainer.log_every_steps", "step"),), "frequent_logging", log_every=10, log_ms=30.0),
    "checkpoint": Case(
        (("trainer.checkpoint_every_steps", "gap"),), "frequent_checkpoints", checkpoint_every=25, checkpoint_ms=150.0
    ),
    "validation": Case((("epoch", "gap"),), "frequent_validation", epoch_steps=20, validate_ms=150.0),
    "epoch_end_and_checkpoint": Case(
        (("epoch", "wait"), ("trainer.checkpoint_every_steps", "gap")),
        "restarted_workers",
        steps=240,
        epoch_steps=40,
        restart_ms=150.0,
        checkpoint_every=25,
        checkpoint_ms=150.0,
    ),
    "healthy": Case(()),
    "evenly_starved": Case((), workers=1, build_ms=40.0, step_ms=8.0),
    "noisy": Case((), noise=8.0),
}


class Slow:
    """Takes its time for a batch: about ``build_ms``, the same for the same samples."""

    def __init__(self, size: int, build_ms: float, jitter: float) -> None:
        self._size, self._build_ms, self._jitter = size, build_ms, jitter

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)

    def fetch(self, indices: Tensor, rng: SampleRng) -> Tensor:
        nap(self._build_ms, self._jitter, np.random.default_rng(indices.tolist()))
        return indices


def nap(ms: float, jitter: float, rng: np.random.Generator) -> None:
    """Sleep about so long."""
    if ms > 0:
        time.sleep(ms / 1e3 * (1 + jitter * rng.uniform(-1, 1)))


def start_worker(ms: float, jitter: float, worker: int) -> None:
    """What a worker does before its first batch."""
    nap(ms, jitter, np.random.default_rng([worker, time.monotonic_ns()]))


def run(case: Case, jitter: float, seed: int, folder: Path) -> tuple[Evidence, dict[str, list[float]]]:
    """What a loop with these delays leaves in a run folder; and when, in truth, each setting's turn came."""
    came_s: dict[str, list[float]] = {}
    rng, record = np.random.default_rng(seed), RunRecord.start("swing")
    settings = LoaderSettings("processes", case.workers, 2, persistent_workers=case.restart_ms is None)
    record.plan = {
        f"loader.{name}": {"value": value, "because": "", "source": "set"} for name, value in asdict(settings).items()
    }
    record.config = {
        "trainer": {
            "log_every_steps": case.log_every,
            "checkpoint_every_steps": case.checkpoint_every,
            "validate_every_steps": None,
        }
    }
    journal = Journal(record, folder)
    clock, progress = StepClock(origin_s=journal.origin_s), Progress(time_s=journal.time_s)
    loader = train_loader(
        Slow(BATCH * case.epoch_steps, case.build_ms, jitter),
        settings,
        batch_size=BATCH,
        seed=seed,
        worker_init=partial(start_worker, case.restart_ms or 0.0, jitter),
    )
    progress.enter("train")
    for step in steps(loader, clock, case.steps):
        longer_ms = case.noise * rng.standard_exponential() if rng.random() < 0.2 else 0.0
        if step > WARMUP_STEPS and step % case.workers == 0:
            came_s.setdefault("loader.num_workers", []).append(journal.time_s())
        nap(case.step_ms + longer_ms, 0.05, rng)
        clock.end(step=step, samples=BATCH, micro_batch=BATCH, num_micro=1, warmup=step <= WARMUP_STEPS)
        journal.steps(clock.rows())
        if step % case.log_every == 0:
            came_s.setdefault("trainer.log_every_steps", []).append(journal.time_s())
            nap(case.log_ms, jitter, rng)
        if step % case.epoch_steps == 0:
            came_s.setdefault("epoch", []).append(journal.time_s())
        if case.checkpoint_every and step % case.checkpoint_every == 0:
            came_s.setdefault("trainer.checkpoint_every_steps", []).append(journal.time_s())
            with progress.during("checkpoint"):
                clock.interrupt()
                nap(case.checkpoint_ms, jitter, rng)
                journal.event("checkpoint", step=step, file="last.ckpt")
        if case.validate_ms and step % case.epoch_steps == 0:
            with progress.during("validate"):
                nap(case.validate_ms, jitter, rng)
                clock.interrupt()
    progress.enter("start")
    summary = journal.summary()
    assert summary is not None
    record.steps, record.samples, record.status = case.steps, BATCH * case.steps, "ok"
    record.machine = {"cpu_quota_cores": 8.0}
    record.throughput = {
        "samples_per_s": summary.samples_per_s,
        "ci95": list(summary.ci95) if summary.ci95 else None,
        "steps": summary.steps,
        "warmup_steps": summary.warmup_steps,
        "sample_unit": "samples",
    }
    shares = {name: getattr(summary, name) for name in ("wait_frac", "copy_frac", "compute_frac", "host_frac")}
    record.time = {  # type: ignore[typeddict-item]
        **shares,
        "step_ms_p50": summary.step_ms_p50,
        "step_ms_p95": summary.step_ms_p95,
        "launch_ms_p50": None,
    }
    record.phases = {phase: {"total_s": s, "times": times} for phase, (s, times) in progress.spent().items()}
    journal.save()
    return Evidence.read(folder), came_s


def steps(loader: Any, clock: StepClock, number: int) -> Iterator[int]:
    """Numbers of steps whose batch is there, from epoch to epoch."""
    step = 0
    with closing(loader):
        while step < number:
            clock.interrupt()
            for _ in TimedLoader(loader, clock):
                clock.copied()
                step += 1
                yield step
                if step == number:
                    return


def judged(name: str, jitter: float, seed: int) -> dict[str, Any]:
    """What a repeat found, and whether that is right."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        evidence, came_s = run(case, jitter, seed, Path(folder))
    found = [(swing.settings[0], swing.where) for swing in evidence.swings.of_steps]
    findings = [finding.id for finding in run_rules(evidence)]
    wanted = set(case.expected)
    if found and found[0] in wanted:
        period_s = evidence.steps.period_s(evidence.swings.of_steps[0].lag)
        came = came_s[found[0][0]]
        true_s = (came[-1] - came[0]) / (len(came) - 1)
    else:
        period_s = true_s = None
    return {
        "case": name,
        "jitter": jitter,
        "seed": seed,
        "swings": [
            [*each, swing.lag, round(swing.r2, 3)] for each, swing in zip(found, evidence.swings.of_steps, strict=True)
        ],
        "findings": findings,
        "is_right": set(found) == wanted and (not wanted or found[0] in wanted),
        "is_found": wanted <= set(found),
        "is_first": bool(found) and found[0] in wanted if wanted else not found,
        "is_told": not case.rule or case.rule in findings,
        "wait_frac": evidence.wait_frac,
        "period_s": period_s,
        "true_period_s": true_s,
    }


def nine_to_ninety(seed: int) -> dict[str, Any]:
    """From telemetry alone: the driver's wave as it is read at 2 Hz."""
    import shutil

    from tests.fake_nvml.driver import FakeDriver, FakeGpu, Scenario, Wave
    from wellfed.explain.diagnosis.curves.swing import swing_in_time

    rng = np.random.default_rng(seed)
    wave = Wave(9.5, duty_frac=float(rng.uniform(0.3, 0.7)), low=9, high=90)
    with tempfile.TemporaryDirectory() as scratch:
        driver = FakeDriver(Path(shutil.which("cc") or "cc"), Path(scratch))
        scenario = Scenario([FakeGpu("GPU-0", "NVIDIA H200", 141.0, util=wave)])
        with driver.load(scenario) as loaded:
            import pynvml

            pynvml.nvmlInit()
            handle, at_s, values = pynvml.nvmlDeviceGetHandleByIndex(0), [0.0], []
            for _ in range(240):
                values.append(float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu))
                passed_s = 0.5 * float(rng.uniform(0.95, 1.05))
                loaded.advance(passed_s)
                at_s.append(at_s[-1] + passed_s)
            pynvml.nvmlShutdown()
    found = swing_in_time(np.array(at_s[:-1]), np.array(values))
    return {
        "case": "9_to_90",
        "jitter": 0.0,
        "seed": seed,
        "period_s": found and found.period_s,
        "levels": found and [found.low, found.high],
        "is_right": found is not None and abs(found.period_s / 9.5 - 1) <= 0.05,
    }


def stalling(period_s: float, batch: int = 32) -> Datasets:
    """Data of a run on the simulated card: what it is read from stands still for half of each period."""
    drawn = torch.randn(400 * batch, 32, generator=torch.Generator().manual_seed(0))
    return Datasets(Stalling(drawn, period_s), None)


class Stalling:
    """Whole batches at once, but for the second half of each period."""

    def __init__(self, inputs: Tensor, period_s: float) -> None:
        self._inputs, self._period_s, self._began_at_s = inputs, period_s, time.monotonic()

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self._inputs[index], "labels": (self._inputs[index, 0] > 0).long()}

    def fetch(self, indices: Tensor, rng: SampleRng) -> dict[str, Tensor]:
        since_s = (time.monotonic() - self._began_at_s) % self._period_s
        if since_s > self._period_s / 2:
            time.sleep(self._period_s - since_s)
        return {"inputs": self._inputs[indices], "labels": (self._inputs[indices][:, 0] > 0).long()}


def on_card(folder: Path, period_s: float, seconds: float) -> RunRecord:
    """The record of a run of `src/train.py` on a simulated card, whose data stall with this period."""
    configs = folder / "configs" / "workload"
    configs.mkdir(parents=True)
    (configs / "stalling.yaml").write_text(
        "name: stalling\neffective_batch_size: 32\n"
        "model: {_target_: planted_workload.Table, step_ms: 20.0, batch: 32, rests: false}\n"
        f"data: {{_target_: swings.stalling, period_s: {period_s}}}\n"
        "optimizer: {_target_: torch.optim.AdamW, lr: 0.001}\n"
    )
    words = [
        *("tools/simulated.py", "24gb", "--kernel-us", "500", "--", "python", "src/train.py"),
        *("--config-dir", str(folder / "configs"), "workload=stalling", "logger=none", "loader.backend=inline"),
        *("config.allow_targets=[planted_workload,swings,torch]", f"trainer.max_time_s={seconds}"),
        *("trainer.accelerator=gpu", f"paths.log_dir={folder / 'logs'}", "loader.num_workers=0"),
    ]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "benchmarks"), str(ROOT)])
    words[words.index("python")] = sys.executable
    variables = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )
    found = next(folder.glob("logs/*/runs/*/run.json"), None)
    if done.returncode or found is None:
        raise RuntimeError(done.stdout + done.stderr)
    return RunRecord.read(found.parent)


def swing_table(
    repeats: int = 20, cases: Sequence[str] = tuple(CASES), jitters: Sequence[float] = JITTERS, jobs: int = 4
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A row a case and jitter: how often the cause was right; and the single repeats."""
    planned = [(name, jitter, 1009 * number + 31) for number in range(repeats) for name in cases for jitter in jitters]
    context = multiprocessing.get_context("fork")
    torch.set_num_threads(1)
    with _Pool(context, jobs) as pool:
        raw = pool.all(planned)
    rows = []
    for name in cases:
        for jitter in jitters:
            alike = [one for one in raw if (one["case"], one["jitter"]) == (name, jitter)]
            row = {"case": name, "jitter": jitter, "n": len(alike)}
            for what in ("is_right", "is_first", "is_found", "is_told"):
                row[f"{what[3:]}_frac"] = statistics.fmean(one[what] for one in alike)
            off = [abs(one["period_s"] / one["true_period_s"] - 1) for one in alike if one["period_s"]]
            row["period_off_frac_median"] = statistics.median(off) if off else None
            row["period_off_frac_p95"] = float(np.quantile(off, 0.95)) if off else None
            row["wait_frac_mean"] = statistics.fmean(one["wait_frac"] for one in alike)
            r2 = [one["swings"][0][3] for one in alike if one["swings"]]
            row["r2_mean"] = statistics.fmean(r2) if r2 else None
            rows.append(row)
    return rows, raw


class _Pool:
    """Processes that may have workers of their own, which those of `multiprocessing.Pool` may not."""

    def __init__(self, context: Any, jobs: int) -> None:
        from concurrent.futures import ThreadPoolExecutor

        self._context, self._threads = context, ThreadPoolExecutor(jobs)

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()

    def all(self, planned: Sequence[tuple[str, float, int]]) -> list[dict[str, Any]]:
        return list(self._threads.map(self._one, planned))

    def _one(self, about: tuple[str, float, int]) -> dict[str, Any]:
        receiver, sender = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_send, args=(sender, about))
        process.start()
        sender.close()
        found: dict[str, Any] = receiver.recv()
        process.join()
        return found


def _send(sender: Any, about: tuple[str, float, int]) -> None:
    sender.send(judged(*about))


def _short(name: str) -> str:
    return name.removesuffix("_mean").removesuffix("_frac_median")


def show(rows: Sequence[dict[str, Any]]) -> str:
    """The table for a terminal."""
    names = (
        "case",
        "jitter",
        "n",
        "right_frac",
        "first_frac",
        "found_frac",
        "told_frac",
        "period_off_frac_median",
        "wait_frac_mean",
        "r2_mean",
    )
    lines = ["".join(f"{_short(name):>26}" if name == "case" else f"{_short(name):>12}" for name in names)]
    for row in rows:
        cells = [row[name] for name in names]
        shown = ["" if cell is None else f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells]
        lines.append("".join(f"{cell:>26}" if not place else f"{cell:>12}" for place, cell in enumerate(shown)))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--jitters", nargs="+", type=float, default=list(JITTERS))
    parser.add_argument("--jobs", type=int, default=4, help="repeats at the same time; they sleep most of it")
    parser.add_argument("--card-s", type=float, default=75.0, help="of the run on the simulated card; 0 = none")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    rows, raw = swing_table(chosen.repeats, chosen.cases, chosen.jitters, chosen.jobs)
    print(show(rows))
    waves = [nine_to_ninety(seed) for seed in range(chosen.repeats)]
    periods_s = [one["period_s"] for one in waves if one["period_s"]]
    right_frac = statistics.fmean(one["is_right"] for one in waves)
    said = f"right {right_frac:.2f}, {min(periods_s):.2f} to {max(periods_s):.2f} s"
    print(f"9 % to 90 %, 9.5 s, by the driver alone: {said}")
    card = []
    if chosen.card_s:
        with tempfile.TemporaryDirectory() as folder:
            record = on_card(Path(folder), 9.5, chosen.card_s)
        card = [
            {
                "case": "on_card",
                "swing": record.swing,
                "first": record.findings[0],
                "util": record.gpus["0"]["util_pct"],
            }
        ]
        print(f"on the simulated card: {record.swing}\n{record.findings[0]['text']}")
    if chosen.out is not None:
        written = {
            "theme": "swings",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": "python benchmarks/" + " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "git": {key: value for key, value in (git_state(ROOT) or {}).items() if key != "diff"},
            "machine": asdict(machine()),
            "config": {name: asdict(case) for name, case in CASES.items()},
            "results": [
                *rows,
                *card,
                {"case": "9_to_90", "n": len(waves), "right_frac": right_frac, "period_s": periods_s},
            ],
            "raw": [*raw, *waves],
            "says": show(rows),
        }
        write_record(written, chosen.out)


if __name__ == "__main__":
    main()
