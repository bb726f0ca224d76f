"""What does watching cost? Samples/s of a training loop with and without it, and the CPU time of its threads.

    python benchmarks/telemetry_cost.py [--pairs 12] [--block-s 6] [--out RECORD]
    python benchmarks/telemetry_cost.py --peers [--windows 5] [--window-s 15] [--out RECORD]

With --peers: the share of a core of several programs that read the same GPUs twice a second, in processes that do
nothing else: a run's telemetry, `wellfed monitor`, nvitop's collector, wandb's own readings. All watch at the same
time, which disturbs none of them: each takes a few hundredths of a core. Without it:

Blocks with and without watching take turns within one process, so that a noisy machine disturbs both alike; a ratio is
that of two neighbouring blocks. The loop trains a small network: its steps take a fraction of a millisecond and hold
Python's lock most of the time, which is where another thread hurts most. Rows go to telemetry.csv and to wandb
(offline). Where there is no GPU, the fake driver of the tests plays two H200 to the real pynvml, or one that is slow
(200 ms a call), or that hangs (3 s in one call of each reading).
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.measuring import alone, compared, finish, has, interval  # noqa: E402
from tests.fake_nvml.driver import FakeDriver, FakeGpu, Hang, Scenario, Wave  # noqa: E402
from wellfed.observe.hardware.detect import machine  # noqa: E402
from wellfed.observe.loggers.journal import Journal  # noqa: E402
from wellfed.observe.loggers.wandb_sink import WandbSink, open_run  # noqa: E402
from wellfed.observe.machine_facts import GpuFacts  # noqa: E402
from wellfed.observe.telemetry.run_progress import Progress  # noqa: E402
from wellfed.observe.telemetry.sampler import Sampler  # noqa: E402
from wellfed.record.entries import RunRecord  # noqa: E402

BATCH, WIDTH = 32, 64
WARMUP_S = 1.0


class Loop:
    """The training loop; plain PyTorch, and what the callback of a run does once a step."""

    def __init__(self, progress: Progress, device: torch.device) -> None:
        self._model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)).to(device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), fused=True)
        self._inputs = torch.randn(BATCH, WIDTH, device=device)
        self._progress, self._device = progress, device

    def rate(self, seconds: float) -> float:
        """Samples/s over so many seconds; the device is waited for at the edges."""
        self._wait()
        steps, began_at_s = 0, time.perf_counter()
        while time.perf_counter() - began_at_s < seconds:
            self._optimizer.zero_grad()
            self._model(self._inputs).square().mean().backward()
            self._optimizer.step()
            steps += 1
            self._progress.step_done(steps)
        self._wait()
        return BATCH * steps / (time.perf_counter() - began_at_s)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def drivers(fake: bool) -> dict[str, tuple[Scenario | None, float]]:
    """Variant -> (what the fake driver plays, telemetry.interval_s)."""
    if not fake:
        return {"2 Hz": (None, 0.5), "10 Hz": (None, 0.1)}
    gpus = [FakeGpu(f"GPU-{number}", "NVIDIA H200", 141.0, util=Wave(9.5, low=9, high=90), gpm=True) for number in "01"]
    return {
        "2 Hz": (Scenario(gpus), 0.5),
        "10 Hz": (Scenario(gpus), 0.1),
        "2 Hz, 200 ms a call": (Scenario(gpus, slow_ms=200), 0.5),
        "2 Hz, 3 s a call": (Scenario(gpus, hangs=[Hang("nvmlDeviceGetMemoryInfo_v2", 3.0)]), 0.5),
    }


def measure(
    loop: Loop, watching: Callable[[], Sampler], progress: Progress, pairs: int, block_s: float
) -> dict[str, list[float]]:
    """Ratios of samples/s (with / without) and the threads' share of CPU, one a pair; the first pair is dropped."""
    ratios, shares = [], []
    for number in range(pairs + 1):
        rates = {}
        for watched in (True, False) if number % 2 else (False, True):
            sampler: AbstractContextManager[Sampler | None] = watching() if watched else nullcontext()
            progress.phase = "train"
            with sampler as running:
                loop.rate(WARMUP_S)  # threads start, and find out what the GPUs offer
                cpu_s, began_at_s = running.cpu_s() if running else 0.0, time.perf_counter()
                rates[watched] = loop.rate(block_s)
                if running:
                    shares.append((running.cpu_s() - cpu_s) / (time.perf_counter() - began_at_s))
        ratios.append(rates[True] / rates[False])
    return {"ratio": ratios[1:], "cpu_frac": shares[1:]}


@contextmanager
def of_a_run(folder: Path, *, logs: bool = False) -> Iterator[None]:
    """Watches as a run does: rows to telemetry.csv and, if it logs, to wandb (offline)."""
    journal = Journal(RunRecord.start("cost"), folder)
    if logs:
        journal.sink = opened(folder)
    progress = Progress()
    sampler = Sampler(
        journal.telemetry,
        lambda kind, **facts: None,
        journal.publish,
        interval_s=INTERVAL_S,
        progress=progress,
        time_s=journal.time_s,
    )
    sampler.watch(machine().gpus)
    progress.phase = "train"
    with sampler:
        yield
    if logs:
        journal.sink.finish({}, 0)


def opened(folder: Path) -> WandbSink:
    return open_run(
        folder, mode="offline", project="wellfed", entity=None, group=None, name="cost", run_id=None, config={}
    )


@contextmanager
def of_the_monitor(folder: Path) -> Iterator[None]:
    words = [sys.executable, "-m", "wellfed", "monitor", "--seconds", "3600"]
    with subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.terminate()


@contextmanager
def of_nvitop(folder: Path) -> Iterator[None]:
    from nvitop import Device, ResourceMetricCollector, collect_in_background

    collector = ResourceMetricCollector(devices=Device.all(), root_pids={os.getpid()}, interval=INTERVAL_S)
    collect_in_background(lambda metrics: True, collector, interval=INTERVAL_S)
    yield


@contextmanager
def of_wandb(folder: Path) -> Iterator[None]:
    import wandb

    settings = wandb.Settings(x_stats_sampling_interval=INTERVAL_S, silent=True)
    with wandb.init(project="cost", mode="offline", dir=str(folder), settings=settings):
        yield


WATCHERS: Mapping[str, tuple[str, Callable[[Path], AbstractContextManager[None]]]] = {
    "telemetry of a run": ("wellfed", of_a_run),
    "telemetry of a run, put into wandb": ("wellfed", partial(of_a_run, logs=True)),
    "wellfed monitor": ("wellfed", of_the_monitor),
    "nvitop": ("nvitop", of_nvitop),
    "wandb": ("wandb", of_wandb),
}
"""Package and watcher of each program."""
PAIRS = (("telemetry of a run", "nvitop"), ("telemetry of a run, put into wandb", "wandb"))
"""What is compared: nvitop hands its figures to a function that drops them, wandb stores them."""
INTERVAL_S = 0.5
START_S = 4.0


def serve(name: str) -> None:
    """Watches, and prints its CPU seconds so far for each line of the standard input."""
    with tempfile.TemporaryDirectory() as folder, WATCHERS[name][1](Path(folder)):
        for _ in sys.stdin:
            children = psutil.Process().children(recursive=True)
            print(time.process_time() + sum(sum(child.cpu_times()[:2]) for child in children), flush=True)


def shares(environment: Mapping[str, str], windows: int, window_s: float) -> dict[str, list[float]]:
    """Returns the share of a core of each program that is installed, one a window."""
    names = [name for name, (package, _) in WATCHERS.items() if has(package)]
    found: dict[str, list[float]] = {name: [] for name in names}
    with ExitStack() as stack:
        programs = {
            name: stack.enter_context(
                subprocess.Popen(
                    [sys.executable, __file__, "--watcher", name],
                    env={**os.environ, **environment},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            )
            for name in names
        }

        def taken_s(name: str) -> tuple[float, float]:
            print(file=programs[name].stdin, flush=True)
            return time.perf_counter(), float(programs[name].stdout.readline())

        before = {name: taken_s(name) for name in names}  # waits until all watch
        for number in range(windows + 1):
            time.sleep(window_s if number else START_S)
            for name in names:
                now = taken_s(name)
                if number:
                    found[name].append((now[1] - before[name][1]) / (now[0] - before[name][0]))
                before[name] = now
    return found


def beside_peers(windows: int, window_s: float, out: Path | None) -> None:
    """Prints and writes what each program takes with one GPU and with eight, or with those of this machine."""
    results: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        real = len(machine().gpus)
        driver = None if real else FakeDriver(_compiler(), Path(scratch))
        for cards in (real,) if real else (1, 8):
            gpus = [FakeGpu(f"GPU-{number}", util=Wave(9.5, low=9, high=90), gpm=True) for number in range(cards)]
            found = shares(driver.environment(Scenario(gpus)) if driver else {}, windows, window_s)
            results += [
                {"program": name, "gpus": cards, "n": windows, "core_pct_median": 100 * statistics.median(each)}
                for name, each in found.items()
            ]
            per_cent = {name: [max(0.01, 100 * share) for share in each] for name, each in found.items()}
            what = f"reading {cards} GPU{'s' if cards > 1 else ''} and the host twice a second"
            for title, ours, peer in ((what, *PAIRS[0]), (f"{what}, into wandb", *PAIRS[1])):
                if peer == "wandb" and not real:  # its own readings see no simulated GPU
                    rows.append(alone(title, "% of a core", per_cent[ours]))
                else:
                    peers = {peer: per_cent.get(peer)}
                    rows += compared(title, "% of a core", per_cent[ours], peers, less_is_better=True)
    says = ", ".join(f"{row['program']} ({row['gpus']} GPUs) {row['core_pct_median']:.2f} %" for row in results)
    config = {"interval_s": INTERVAL_S, "window_s": window_s, "driver": "real" if real else "fake"}
    finish("telemetry_peers", results, f"Share of a core: {says}.", out, config=config, compared=rows)


def _compiler() -> Path:
    found = shutil.which("cc") or shutil.which("gcc")
    if found is None:
        raise SystemExit("No GPU here, and no C compiler to build the fake driver with: apt-get install gcc libc6-dev")
    return Path(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--block-s", type=float, default=6.0)
    parser.add_argument("--peers", action="store_true", help="the share of a core beside other programs")
    parser.add_argument("--windows", type=int, default=5, help="of --peers")
    parser.add_argument("--window-s", type=float, default=15.0)
    parser.add_argument("--watcher", choices=WATCHERS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    if chosen.watcher:
        serve(chosen.watcher)
        return
    if chosen.peers:
        beside_peers(chosen.windows, chosen.window_s, chosen.out)
        return
    scratch = Path(tempfile.mkdtemp())
    facts = machine()
    fake = not facts.gpus
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    journal = Journal(RunRecord.start("cost"), scratch)
    journal.sink = opened(scratch)
    raw: dict[str, dict[str, list[float]]] = {}
    events: list[dict[str, object]] = []
    for name, (scenario, interval_s) in drivers(fake).items():
        progress = Progress()
        with FakeDriver(_compiler(), scratch).load(scenario) if scenario else nullcontext():
            watched = machine().gpus

            def watching(
                watched: tuple[GpuFacts, ...] = watched,
                progress: Progress = progress,
                interval_s: float = interval_s,
                name: str = name,
            ) -> Sampler:
                sampler = Sampler(
                    journal.telemetry,
                    lambda kind, **facts: events.append({"variant": name, "kind": kind, **facts}),
                    journal.publish,
                    interval_s=interval_s,
                    progress=progress,
                    time_s=journal.time_s,
                )
                sampler.watch(watched)
                return sampler

            raw[name] = measure(Loop(progress, device), watching, progress, chosen.pairs, chosen.block_s)
        low, high = interval(raw[name]["ratio"])
        print(
            f"{name:>20}: samples/s x {statistics.fmean(raw[name]['ratio']):.4f} ({low:.4f} to {high:.4f}), "
            f"threads {100 * statistics.fmean(raw[name]['cpu_frac']):.2f} % of a core",
            flush=True,
        )
    journal.sink.finish({}, 0)
    shutil.rmtree(scratch)
    results = [
        {
            "variant": name,
            "n": len(found["ratio"]),
            "samples_per_s_ratio_mean": statistics.fmean(found["ratio"]),
            "samples_per_s_ratio_ci95": interval(found["ratio"]),
            "cpu_frac_mean": statistics.fmean(found["cpu_frac"]),
            "cpu_frac_max": max(found["cpu_frac"]),
            "events": sorted(
                {str(event.get("trouble", event["kind"])) for event in events if event["variant"] == name}
            ),
        }
        for name, found in raw.items()
    ]
    worst = min(result["samples_per_s_ratio_ci95"][0] for result in results)
    config = {
        "warmup_s": WARMUP_S,
        "batch": BATCH,
        "width": WIDTH,
        "driver": "fake, 2 GPUs" if fake else "real",
        "threads": 1,
    }
    says = (
        f"2 Hz takes {100 * results[0]['cpu_frac_mean']:.2f} % of a core "
        f"and leaves {results[0]['samples_per_s_ratio_mean']:.4f} of the samples/s; over all variants the "
        f"lowest end of an interval is {worst:.4f}."
    )
    finish("telemetry_cost", results, says, chosen.out, config=config)


if __name__ == "__main__":
    main()
