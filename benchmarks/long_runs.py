"""Shows that long runs hold: what they take stays flat, and their end is as fast as their beginning.

    make long
    python benchmarks/long_runs.py [--only steps trials] [--steps 500] [--epochs 20] [--add] [--out RECORD]
    python benchmarks/long_runs.py --only steps --plant memory
    python benchmarks/long_runs.py --page

Each of `RUNS` is a command of its own that trains a tiny model. Its processes are watched from outside: memory, file
handles, threads, shared memory, CPU time, and the size of the run's folder. Renewals of the page are left out, which
last a second each. Afterwards the commands that read the run are timed.

- A slope is fitted to `PARTS` means over the second half of a run. Its interval comes from their scatter, since single
  samples are not independent.
- Speed compares the last tenth with the first, once all that is bounded is full (`Long.settles`). Its interval
  comes from the scatter of the ten tenths about a line.

Exit code 1: something grows beyond `NOISE` and what `MAY_GROW` allows, the end is slower, a command takes longer than
`LIMIT_S`, or a run fails. If other programs take more than `BUSY_FRAC` of the CPUs, times have no verdict. The record
is written after each run; `--add` keeps the other runs of the record. `--plant` makes the training leak or slow down,
to see that this is found. `--page` writes the table of docs/reliability.md from the newest record.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import numpy as np  # noqa: E402
import psutil  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from benchmarks.measuring import finish  # noqa: E402
from wellfed.contract import Datasets, LossOutput  # noqa: E402
from wellfed.observe.loggers.journal import KEPT_STEPS  # noqa: E402
from wellfed.observe.telemetry.host import cpu_seconds  # noqa: E402
from wellfed.observe.timing.interval import student_t_975  # noqa: E402
from wellfed.study import ledger  # noqa: E402

RECORDS = ROOT / "benchmarks" / "records"
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- make long -->", "<!-- end of make long -->"
EVERY_S, SAMPLING_FRAC = 0.1, 0.1
"""Seconds between samples, and the largest share of a core that sampling may take."""
PARTS = 10
LIMIT_S = 5.0
"""Longest time of a command that reads a finished run."""
BUSY_FRAC = 0.1
SLOWER, TOO_WIDE = 0.95, 0.8
"""Speed of the end over the beginning. The end is slower if the whole interval is below the first; there is no verdict
if the interval begins below the second."""
LONGEST_S = 3600.0
READING_S = 4.0
"""Seconds between readings of the week of telemetry; `growth.py` writes a week of two readings a second."""

# -- what may grow -----------------------------------------------------------------------------------------------------

NOISE: Mapping[str, float] = {
    "uss_kib": 8192.0,
    "rss_kib": 8192.0,
    "handles": 1.0,
    "threads": 1.0,
    "shm_kib": 1024.0,
    "folder_kib": 256.0,
}
"""Figures that are watched, and the growth of each over the second half of a run that counts as none. Of the processes'
memory, USS is what no other process shares, and shm is what lies in /dev/shm."""
STEP_KIB = 0.75
"""Memory of the figures of a step, which a run keeps for its latest `KEPT_STEPS` steps."""
MAY_GROW: Mapping[tuple[str, str], tuple[float, float, str]] = {
    **{
        (name, what): (STEP_KIB * steps, KEPT_STEPS / steps, f"figures of the latest {KEPT_STEPS:,} steps")
        for name, steps in (("steps", 1), ("epochs", 5), ("validations", 20), ("checkpoints", 5))
        for what in ("uss_kib", "rss_kib")
    },
    ("steps", "folder_kib"): (0.25, math.inf, "rows of the tables"),
    ("epochs", "folder_kib"): (3.0, math.inf, "rows of the tables"),
    ("validations", "folder_kib"): (6.0, math.inf, "rows of the tables"),
    ("checkpoints", "folder_kib"): (2.0, math.inf, "rows of the tables"),
    ("trials", "uss_kib"): (8.0, math.inf, "rows of the ledger"),
    ("trials", "rss_kib"): (8.0, math.inf, "rows of the ledger"),
    ("trials", "folder_kib"): (60.0, math.inf, "a folder for each trial"),
    ("hours", "folder_kib"): (200.0, math.inf, "rows of telemetry.csv"),
}
"""Run and figure -> the most that a unit of the run may add, the unit from which on it adds nothing, and the reason.
All other figures are flat."""

# -- the runs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Long:
    """A long run, named by its unit."""

    size: int
    """Units of the run."""
    words: Callable[[int], Sequence[str]]
    """Returns the overrides of a run of a size."""
    steps: int = 1
    """Steps of a unit."""
    settles: int = 0
    """Units until all that grows up to a bound is full: figures of 100,000 steps, 500 events of a kind, 10,000
    readings."""


def _steps(n: int) -> list[str]:
    return ["loader.backend=inline", f"workload.data.steps={min(n, 1000)}", f"trainer.max_steps={n}"]


def _epochs(n: int) -> list[str]:
    """Each epoch has a worker process of its own, and ends with a validation and a checkpoint."""
    workers = ["loader.backend=torch", "loader.num_workers=1", "loader.persistent_workers=false"]
    return [*workers, "workload.data.steps=5", f"trainer.max_epochs={n}"]


def _validations(n: int) -> list[str]:
    workers = ["loader.backend=processes", "loader.num_workers=1", "trainer.validate_every_steps=20"]
    return [*workers, f"workload.data.steps={20 * n}", f"trainer.max_steps={20 * n}"]


def _checkpoints(n: int) -> list[str]:
    workers = ["loader.backend=threads", "loader.num_workers=1", "trainer.checkpoint_every_steps=5"]
    return [*workers, f"workload.data.steps={5 * n}", f"trainer.max_steps={5 * n}"]


def _trials(n: int) -> list[str]:
    """Two axes that change nothing, so that all trials are alike."""
    values = min(n, 40)
    axes = [f"trainer.keep_last=range(1,{values + 1})"]
    axes += [f"trainer.log_every_steps=range(1,{n // values + 1})"] if n >= 2 * values else []
    sweep = ["sweep=quick", "loader=baseline", "sweep.name=trials", f"sweep.max_trials={n}", "sweep.trial_steps=10"]
    return ["-m", *sweep, "telemetry=none", "trainer.max_steps=1000", *axes]


RUNS: Mapping[str, Long] = {
    "steps": Long(200_000, _steps, settles=100_000),
    "epochs": Long(2_000, _epochs, steps=5, settles=500),
    "validations": Long(2_500, _validations, steps=20),
    "checkpoints": Long(1_000, _checkpoints, steps=5, settles=500),
    "trials": Long(2_000, _trials),
    "hours": Long(168, lambda n: (), settles=14),
}
BATCH = 8
COMMON = (
    *("workload=long", "config.allow_targets=[torch,benchmarks]", "trainer.accelerator=cpu", "logger=none"),
    *("telemetry.ceiling_steps=0", "paths.log_dir=logs", "trainer.max_epochs=null"),
)
WORKLOAD = f"""
name: long
effective_batch_size: {BATCH}
model: {{_target_: benchmarks.long_runs.Model, plant: ""}}
data: {{_target_: benchmarks.long_runs.datasets, steps: 100}}
optimizer: {{_target_: torch.optim.AdamW, lr: 0.001}}
"""
PLANTS: Mapping[str, Callable[[int], Any]] = {
    "memory": lambda step: bytes([step % 256]) * 4096,
    "handles": lambda step: os.open(os.devnull, os.O_RDONLY) if step % 100 == 0 else None,
    "time": lambda step: time.sleep(1e-6 * step),
}
"""Name of a fault -> what the step of this number keeps or does."""


class Model(nn.Module):
    """A linear layer, with a fault that grows with the steps if one is planted."""

    def __init__(self, plant: str) -> None:
        super().__init__()
        self.layer, self._planted, self._kept = nn.Linear(4, 1), PLANTS.get(plant), list[Any]()

    def loss(self, batch: dict[str, Tensor]) -> LossOutput:
        if self._planted is not None and self.training:
            self._kept.append(self._planted(len(self._kept)))
        return LossOutput((self.layer(batch["x"]) - batch["y"]).square().mean())


class Samples:
    """Samples in memory, one by one or a batch at once."""

    def __init__(self, number: int) -> None:
        self.x = torch.randn(number, 4, generator=torch.Generator().manual_seed(number))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.x[index].sum(0, keepdim=True)}

    def fetch(self, indices: Tensor, rng: Any = None) -> dict[str, Tensor]:
        return {"x": self.x[indices], "y": self.x[indices].sum(1, keepdim=True)}


def datasets(steps: int) -> Datasets:
    """Returns training data of a number of steps, and two batches each of validation and test data."""
    return Datasets(Samples(BATCH * steps), Samples(2 * BATCH), Samples(2 * BATCH))


def watch_a_week(folder: Path, hours: float) -> None:
    """Reads host and GPU with the threads of a run, as fast as they can. Their clock moves on before each reading."""
    from wellfed.observe.loggers.journal import Journal
    from wellfed.observe.telemetry.gpu import GpuSource, WatchedGpu
    from wellfed.observe.telemetry.host import HostSource
    from wellfed.observe.telemetry.run_progress import Progress
    from wellfed.observe.telemetry.sampler import Sampler
    from wellfed.observe.telemetry.series import Sample, Summary
    from wellfed.record import RunRecord

    folder.mkdir(parents=True, exist_ok=True)
    now_s, taken = [0.0], threading.Semaphore(0)
    record = RunRecord.start(folder.name)
    record.workload = "long"
    journal, progress = Journal(record, folder), Progress(time_s=lambda: now_s[0])
    journal.save()
    summary = Summary(progress.trained_s)

    def take(samples: Sequence[Sample]) -> None:
        journal.telemetry(samples)
        summary.add(samples)
        taken.release()

    clocks: Any = {"time_s": lambda: now_s[0], "now_s": lambda: now_s[0]}
    sampler = Sampler(take, journal.event, interval_s=READING_S, progress=progress, **clocks)
    # It searches for new processes for a thousandth of its time. By the clock of the week that would be ten minutes.
    sampler.add(HostSource(now_s=lambda: 0.02 * now_s[0]))
    if uuid := os.environ.get("LONG_RUNS_GPU"):
        sampler.add(GpuSource([WatchedGpu(0, uuid)], sampler.event, now_s=clocks["now_s"]))
    progress.enter("train")
    with sampler:
        for number in range(round(3600 * hours / READING_S)):
            for _ in sampler.watches:
                taken.acquire(timeout=1.0)
            now_s[0] += READING_S
            progress.step_done(10 * number)
            for watch in sampler.watches:
                watch.ticker.nudge()
    record.status, record.steps, record.exit_code = "ok", progress.step, 0
    record.gpus = summary.entry(0, now_s[0])
    journal.save(duration_s=now_s[0])


@contextmanager
def started(name: str, size: int, scratch: Path, plant: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Starts a run in a folder of its own; yields its process and where its files are."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    variables = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    folder = scratch / "logs" / "long" / ("sweeps" if name == "trials" else "runs") / name
    if name == "hours":
        program = "import sys; from pathlib import Path; from benchmarks import long_runs as it; "
        program += "it.watch_a_week(Path(sys.argv[1]), float(sys.argv[2]))"
        command = [sys.executable, "-c", program, str(folder), str(size)]
        variables = {**variables, **fake_gpu(scratch)}
    else:
        options = scratch / "options" / "workload"
        options.mkdir(parents=True, exist_ok=True)
        (options / "long.yaml").write_text(WORKLOAD)
        command = [sys.executable, str(ROOT / "src" / "train.py"), "--config-dir", str(options.parent), *COMMON]
        command += [*RUNS[name].words(size), f"workload.model.plant={plant}"]
        command += [] if name == "trials" else [f"hydra.run.dir={folder}"]
    with (scratch / "printed").open("wb") as printed:
        how: Any = {"cwd": scratch, "env": variables, "stdout": printed, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, **how)
    try:
        yield process, folder
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)


def fake_gpu(scratch: Path) -> dict[str, str]:
    """Returns the variables with which pynvml finds a GPU that a fake driver plays; none without a C compiler."""
    from tests.fake_nvml.driver import FakeDriver, FakeGpu, Scenario, Wave

    compiler = shutil.which("cc")
    if compiler is None:
        return {}
    (scratch / "driver").mkdir(exist_ok=True)
    gpu = FakeGpu(util=Wave(3.0), power_w=Wave(3.0, low=90.0, high=400.0))
    found = FakeDriver(Path(compiler), scratch / "driver").environment(Scenario([gpu]))
    return {name: found[name] for name in ("LD_LIBRARY_PATH", "FAKE_NVML_SCENARIO")} | {"LONG_RUNS_GPU": gpu.uuid}


def commands_of(name: str, folder: Path) -> dict[str, list[str]]:
    """Returns the commands that read a finished run, by name."""
    if name == "trials":
        return {"leaderboard": ["leaderboard", str(folder)]}
    return {"report": ["report", str(folder)], "diagnose": ["diagnose", str(folder)], "runs": ["runs"]}


# -- samples -----------------------------------------------------------------------------------------------------------


def watched(process: subprocess.Popen[bytes], name: str, folder: Path) -> list[dict[str, float]]:
    """Returns samples of a run until it ends."""
    own, samples, began_s = psutil.Process(process.pid), list[dict[str, float]](), time.monotonic()
    while process.poll() is None:
        at_s, spent_s = time.monotonic(), time.process_time()
        if at_s - began_s > LONGEST_S:
            raise SystemExit(f"{name}: not done after {LONGEST_S:.0f} s")
        with suppress(psutil.Error, OSError):
            samples.append({"at_s": at_s, "done": units_done(name, folder), **sample(own, folder)})
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(EVERY_S, (time.process_time() - spent_s) / SAMPLING_FRAC))
    return samples


def sample(own: psutil.Process, folder: Path) -> dict[str, float]:
    """Returns the figures of a process with all that it has started, and the size of a folder."""
    found = Counter(dict.fromkeys((*NOISE, "cpu_s"), 0.0))
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.Error, OSError), process.oneshot():
            if "wellfed.explain.report.renewal" not in process.cmdline():
                found.update({**memory(process.pid), "handles": process.num_fds(), "threads": process.num_threads()})
            found["cpu_s"] += sum(process.cpu_times()[:4])  # with that of its ended children
    for root, _, names in os.walk(folder):
        for file in names:
            with suppress(OSError):
                found["folder_kib"] += os.stat(os.path.join(root, file)).st_size / 1024
    return dict(found)


def memory(pid: int) -> dict[str, float]:
    """Returns the memory of a process; psutil reads the same file, and leaves shm out."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    kib = Counter({line.partition(":")[0]: float(line.split()[1]) for line in lines if line.endswith(" kB")})
    uss_kib = kib["Private_Clean"] + kib["Private_Dirty"]
    return {"uss_kib": uss_kib, "rss_kib": kib["Rss"], "shm_kib": kib["Pss_Shmem"]}


def units_done(name: str, folder: Path) -> float:
    """Returns how many units of a run are done, by its files; 0 before the first."""
    try:
        if name == "trials":
            return float((folder / "ledger.jsonl").read_bytes().count(b"\n"))
        is_week = name == "hours"
        with (folder / ("telemetry.csv" if is_week else "steps.csv")).open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - 4096))
            first = float(stream.read().split(b"\n")[-2].partition(b",")[0])
        return first / (3600 if is_week else RUNS[name].steps)
    except (OSError, ValueError, IndexError):  # no file yet, or the columns alone
        return 0.0


# -- figures -----------------------------------------------------------------------------------------------------------


def fitted(x: Any, y: Any) -> tuple[float, float, float]:
    """Returns the slope of a line, half its 95 % interval, and the standard deviation about the line."""
    dx = x - x.mean()
    slope = float(dx @ y / (dx @ dx))
    residuals = y - y.mean() - slope * dx
    deviation = math.sqrt(float(residuals @ residuals) / (len(x) - 2))
    return slope, student_t_975(len(x) - 2) * deviation / math.sqrt(float(dx @ dx)), deviation


def growth(done: Any, values: Any, what: str, documented: float) -> dict[str, Any]:
    """Returns the row of a figure: its slope in the samples given, and the verdict.

    Args:
        documented: the most that it may grow by in these samples.
    """
    row: dict[str, Any] = {"what": what, "n": len(done)}
    if len(done) < 2 * PARTS or done[0] == done[-1]:
        return {**row, "verdict": "too short"}
    means = np.array([part.mean() for part in np.array_split(values, PARTS)])
    slope, half, _ = fitted(np.array([part.mean() for part in np.array_split(done, PARTS)]), means)
    length, allowed = done[-1] - done[0], NOISE[what] + documented
    verdict = "GROWS" if (slope - half) * length > allowed else "unclear" if (slope + half) * length > allowed else ""
    verdict = verdict or ("as documented" if documented and slope > half else "flat")
    row |= {"first": means[0], "last": means[-1], "per_unit": slope, "ci95": [slope - half, slope + half]}
    return {**row, "grew_by": slope * length, "grew_half": half * length, "may_grow_by": allowed, "verdict": verdict}


def speed(what: str, done: Any, times: Any, settled: float) -> dict[str, Any]:
    """Returns the row of the speed: the last tenth over the first."""
    is_new = np.diff(done, prepend=-1.0) > 0  # files are written by the second
    taken = np.diff(np.interp(np.linspace(settled, done[-1], PARTS + 1), done[is_new], times[is_new]))
    if is_new.sum() < 2 * PARTS or (taken <= 0).any():
        return {"what": what, "n": int(is_new.sum()), "verdict": "too short"}
    logs = np.log(taken)
    _, _, deviation = fitted(np.arange(float(PARTS)), logs)
    half = student_t_975(PARTS - 2) * math.sqrt(2) * deviation
    low, times_as_fast, high = (math.exp(logs[0] - logs[-1] + each) for each in (-half, 0.0, half))
    verdict = "SLOWER" if high < SLOWER else "unclear" if low < TOO_WIDE else "level"
    return {"what": what, "n": PARTS, "times_as_fast": times_as_fast, "ci95": [low, high], "verdict": verdict}


def judged(name: str, size: int, samples: Sequence[Mapping[str, float]], folder: Path) -> list[dict[str, Any]]:
    """Returns the rows of a run: growth of each figure, speed by wall time and by CPU time."""
    kept = [each for each in samples if 0 < each["done"] < size]
    columns = {each: np.array([one[each] for one in kept]) for each in (*NOISE, "cpu_s", "at_s", "done")}
    done, settled = columns["done"], float(min(RUNS[name].settles, size / 2))
    half, rows = done >= size / 2, list[dict[str, Any]]()
    for what in NOISE:
        most, until, _ = MAY_GROW.get((name, what), (0.0, 0.0, ""))
        documented = most * max(0.0, min(size, until) - size / 2)
        rows.append(growth(done[half], columns[what][half], what, documented))
    if len(done) == 0:
        return rows
    wall_done, wall_s = done, columns["at_s"]
    if (folder / "steps.csv").is_file():  # exact times
        steps = np.loadtxt(folder / "steps.csv", delimiter=",", skiprows=1, usecols=(0, 1))
        wall_done, wall_s = steps[:, 0] / RUNS[name].steps, steps[:, 1]
    settled = max(settled, size / 10)  # the first tenth is warm-up
    return [*rows, speed("speed", wall_done, wall_s, settled), speed("speed by CPU", done, columns["cpu_s"], settled)]


def measured(name: str, size: int, scratch: Path, plant: str) -> list[dict[str, Any]]:
    """Runs one long run and returns its rows."""
    began_s, busy_s = time.monotonic(), cpu_seconds()[0]
    with started(name, size, scratch, plant) as (process, folder):
        samples = watched(process, name, folder)
    seconds = time.monotonic() - began_s
    own_s = max((each["cpu_s"] for each in samples), default=0.0) + SAMPLING_FRAC * seconds
    others = max(0.0, cpu_seconds()[0] - busy_s - own_s) / seconds / (os.cpu_count() or 1)
    about = {"run": name, "size": size}
    whole = {**about, "what": "whole", "seconds": seconds, "others_frac": others, "n": len(samples), "verdict": "ok"}
    problem = f"exit code {process.returncode}" if process.returncode else ""
    if (done := units_done(name, folder)) < 0.99 * size:
        problem = problem or f"{done:g} of {size}"
    if not problem and name == "trials":
        statuses = Counter(row.status for row in ledger.read(folder).rows)
        problem = "" if set(statuses) == {"ok"} else f"trials {dict(statuses)}"
    if problem:
        print((scratch / "printed").read_text(errors="replace")[-4000:], file=sys.stderr)
        return [{**whole, "verdict": f"FAILED: {problem}"}]
    rows = [{**about, **row} for row in judged(name, size, samples, folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    for command, words in commands_of(name, folder).items():
        began_s = time.monotonic()
        whole_command = [sys.executable, "-m", "wellfed", *words]
        ended = subprocess.run(whole_command, cwd=scratch, env=environment, check=False, capture_output=True)
        took_s = time.monotonic() - began_s
        verdict = "within 5 s" if took_s <= LIMIT_S else "LATE"
        verdict = f"FAILED: exit code {ended.returncode}" if ended.returncode else verdict
        rows.append({**about, "what": command, "seconds": took_s, "verdict": verdict})
    if others > BUSY_FRAC:
        rows = [{**row, "verdict": "busy"} if row["verdict"] in ("SLOWER", "LATE") else row for row in rows]
    return [whole, *rows]


# -- record and page ---------------------------------------------------------------------------------------------------


def line(row: Mapping[str, Any]) -> str:
    """Returns a row as a line of text."""
    keys = ("seconds", "first", "last", "per_unit", "times_as_fast")
    figures = [f"{key} {row[key]:.4g}" for key in keys if key in row]
    if "ci95" in row:
        figures.append("({:.3g} to {:.3g})".format(*row["ci95"]))
    return f"{row['run']:<12} {row['what']:<13} {' '.join(figures):<72} {row['verdict']}"


def page(text: str, record: Path) -> str:
    """Returns the text of the page with the table of a record."""
    found = json.loads(record.read_text(encoding="utf-8"))
    by_run: dict[str, dict[str, dict[str, Any]]] = {}
    for row in found["results"]:
        by_run.setdefault(row["run"], {})[row["what"]] = row
    heads = ("run", "minutes", "memory, MiB", "handles", "threads", "/dev/shm, MiB", "folder, MiB", "speed", "commands")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, rows in by_run.items():
        whole, fast = rows["whole"], rows.get("speed by CPU", {})
        cells = [f"{whole['size']:,} {name}", f"{whole['seconds'] / 60:.0f}"]
        cells += [
            _grew(rows.get(what, {}), 1024 if what.endswith("_kib") else 1) for what in NOISE if what != "rss_kib"
        ]
        low_high = " to ".join(f"{bound:.2f}" for bound in fast.get("ci95", ()))
        cells.append(f"{fast['times_as_fast']:.2f} ({low_high}) {fast['verdict']}" if low_high else "too short")
        cells.append(", ".join(f"{what} {row['seconds']:.1f} s" for what, row in rows.items() if _is_command(row)))
        lines.append(f"| {' | '.join(cells)} |")
    busy = [f"{rows['whole']['others_frac']:.0%}" for rows in by_run.values()]
    says = found["says"].partition(" No verdict")[0]
    says = f"{says} Other programs took {', '.join(busy)} of the CPUs meanwhile"
    about = f"{says} ([record](../benchmarks/records/{record.name}))."
    table = "\n".join([BEGIN, "", about, "", *lines, "", END])
    return re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: table, text, flags=re.DOTALL)


def _is_command(row: Mapping[str, Any]) -> bool:
    return "seconds" in row and row["what"] != "whole"


def _grew(row: Mapping[str, Any], unit: float) -> str:
    """Returns the growth over the second half, with half its interval, and its verdict unless it is flat."""
    if "grew_by" not in row:
        return row.get("verdict", "")
    verdict = "" if row["verdict"] == "flat" else f" {row['verdict']}"
    return f"{row['grew_by'] / unit:+.1f} ± {row['grew_half'] / unit:.1f}{verdict}"


def says_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the findings of all runs as sentences."""
    sizes = ", ".join(f"{row['size']:,} {row['run']}" for row in rows if row["what"] == "whole")
    bad = [f"{row['run']}: {row['what']} {row['verdict']}" for row in rows if is_bad(row)]
    unclear = [f"{row['run']}: {row['what']}" for row in rows if row["verdict"] in ("unclear", "too short", "busy")]
    found = f"Found: {'; '.join(bad)}." if bad else "No growth beyond what is documented and no slower end was found."
    return f"{sizes}. {found}" + (f" No verdict: {'; '.join(unclear)}." if unclear else "")


def is_bad(row: Mapping[str, Any]) -> bool:
    """Returns whether a row makes the command fail."""
    return row["verdict"].startswith(("GROWS", "SLOWER", "LATE", "FAILED"))


def newest() -> Path:
    """Returns the newest record."""
    return max(RECORDS.glob("????-??-??_long_cpu.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    for name, run in RUNS.items():
        parser.add_argument(f"--{name}", type=int, default=run.size, metavar="N", help=f"default {run.size:,}")
    parser.add_argument("--plant", choices=PLANTS, default="", help="a fault that has to be found")
    parser.add_argument("--add", action="store_true", help="keep the other runs of the record")
    parser.add_argument("--out", type=Path, help="default: of today, or build/long.json for other sizes")
    parser.add_argument("--page", action="store_true", help="write the table from the newest record; run nothing")
    asked = parser.parse_args()
    if asked.page:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), newest()), encoding="utf-8")
        return
    sizes = {name: getattr(asked, name) for name in asked.only}
    is_whole = not asked.plant and all(size == RUNS[name].size for name, size in sizes.items())
    is_whole = is_whole and (asked.add or len(sizes) == len(RUNS))
    today = RECORDS / f"{datetime.now(UTC):%Y-%m-%d}_long_cpu.json"
    out: Path = asked.out or (today if is_whole else ROOT / "build" / "long.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    earlier = json.loads(out.read_text(encoding="utf-8"))["results"] if asked.add and out.exists() else []
    rows = [row for row in earlier if row["run"] not in sizes]
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends the run that is watched, too
    config = {"every_s": EVERY_S, "reading_s": READING_S, "noise": NOISE, "limit_s": LIMIT_S, "slower": SLOWER}
    config |= {"plant": asked.plant, "may_grow": [[*key, most, why] for key, (most, _, why) in MAY_GROW.items()]}
    for name, size in sizes.items():
        with tempfile.TemporaryDirectory(prefix="long-") as scratch:
            found = measured(name, size, Path(scratch), asked.plant)
        print("\n".join(map(line, found)), flush=True)
        rows = sorted([*rows, *found], key=lambda row: list(RUNS).index(row["run"]))
        finish("long", rows, says_of(rows), out, config=config)
    if any(is_bad(row) for row in rows if row["run"] in sizes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
