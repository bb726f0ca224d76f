"""What does watching cost? Samples/s of a training loop with and without it, and the CPU time of its threads.

    python benchmarks/telemetry_cost.py [--pairs 12] [--block-s 6] [--out RECORD]

Blocks with and without watching take turns within one process, so that a noisy machine disturbs both alike; a ratio is
that of two neighbouring blocks. The loop trains a small network: its steps take a fraction of a millisecond and hold
Python's lock most of the time, which is where another thread hurts most. Rows go to telemetry.csv and to wandb
(offline). Where there is no GPU, the fake driver of the tests plays two H200 to the real pynvml, or one that is slow
(200 ms a call), or that hangs (3 s in one call of each reading).
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.write_record import write_record  # noqa: E402
from tests.fake_nvml.driver import FakeDriver, FakeGpu, Hang, Scenario, Wave  # noqa: E402
from wellfed.observe.hardware.detect import machine  # noqa: E402
from wellfed.observe.loggers.journal import Journal  # noqa: E402
from wellfed.observe.loggers.wandb_sink import open_run  # noqa: E402
from wellfed.observe.telemetry.gpu import WatchedGpu  # noqa: E402
from wellfed.observe.telemetry.run_progress import Progress  # noqa: E402
from wellfed.observe.telemetry.sampler import Sampler  # noqa: E402
from wellfed.observe.timing.interval import student_t_975  # noqa: E402
from wellfed.record import RunRecord, git_state  # noqa: E402

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


def interval(values: list[float]) -> list[float]:
    """95 % interval of the mean."""
    half = student_t_975(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return [statistics.fmean(values) - half, statistics.fmean(values) + half]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--block-s", type=float, default=6.0)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    scratch = Path(tempfile.mkdtemp())
    facts = machine()
    fake = not facts.gpus
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    journal = Journal(RunRecord.start("cost"), scratch)
    journal.sink = open_run(
        scratch, mode="offline", project="wellfed", entity=None, group=None, name="cost", run_id=None, config={}
    )
    compiler = shutil.which("cc") or shutil.which("gcc")
    if fake and compiler is None:
        raise SystemExit("No GPU here, and no C compiler to build the fake driver with: apt-get install gcc libc6-dev")
    raw: dict[str, dict[str, list[float]]] = {}
    events: list[dict[str, object]] = []
    for name, (scenario, interval_s) in drivers(fake).items():
        progress = Progress()
        with FakeDriver(Path(str(compiler)), scratch).load(scenario) if scenario else nullcontext():
            watched = [WatchedGpu(gpu.index, str(gpu.uuid)) for gpu in machine().gpus]

            def watching(
                watched: list[WatchedGpu] = watched,
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
    record = {
        "theme": "telemetry_cost",
        "date": datetime.now(UTC).date().isoformat(),
        "command": "python benchmarks/telemetry_cost.py "
        + f"--pairs {chosen.pairs} --block-s {chosen.block_s:g} --out RECORD",
        "git": {key: value for key, value in (git_state(ROOT) or {}).items() if key != "diff"},
        "machine": {"load": os.getloadavg(), **facts.to_dict()},
        "config": {
            "warmup_s": WARMUP_S,
            "batch": BATCH,
            "width": WIDTH,
            "driver": "fake, 2 GPUs" if fake else "real",
            "threads": 1,
        },
        "results": results,
        "raw": raw,
        "says": f"2 Hz takes {100 * results[0]['cpu_frac_mean']:.2f} % of a core "
        f"and leaves {results[0]['samples_per_s_ratio_mean']:.4f} of the samples/s; over all variants the "
        f"lowest end of an interval is {worst:.4f}.",
    }
    print(record["says"])
    if chosen.out:
        write_record(record, chosen.out)


if __name__ == "__main__":
    main()
