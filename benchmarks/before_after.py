"""What do the findings win for somebody who starts where a guide does? Follows them, step by step, and measures.

    make before-after W=recsys
    python benchmarks/before_after.py forecast [--where cpu|simulated|gpu] [--steps 200] [--rounds 5] [--out RECORD]

Begins with ``experiment=<workload>_starved``. What the first finding says to type is typed, unless it would change what
is learned; a change that makes the run slower is taken back, and the next finding is followed. When none is left, the
first and the last configuration run in turns, and their page (report A B) has both curves of utilisation.
``simulated`` is a simulated card behind real loaders (tests/fake_cuda): its figures are of no real GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.fake_cuda.machine import Cards, compile_driver, machine_environment  # noqa: E402
from tests.fake_nvml.driver import FakeDriver  # noqa: E402
from wellfed.diagnosis.evidence import Evidence  # noqa: E402
from wellfed.record import RunRecord, git_state  # noqa: E402
from wellfed.report.comparison import Comparison  # noqa: E402
from wellfed.report.write import write_comparison  # noqa: E402

MOST_STEPS, SLOWER = 8, 0.97
"""Findings that are followed at most; below which share of the rate a change is taken back."""
TIMEOUT_S = 900
CARD: dict[str, Any] = {
    **{"mib": 8192, "context_mib": 300, "launch_us": 5.0, "copy_gbps": 12.0, "pageable_gbps": 4.0},
    **{"tflops": 0.003, "tensor_tflops": 0.012, "dram_gbps": 2.0, "sms": 32, "kernel_us": 20.0},
}
"""A simulated card that is slower than a core of this computer, which computes for it."""


@dataclass(frozen=True)
class Guide:
    """What a published guide says of its system."""

    before: str
    after: str


GUIDES = {
    "recsys": Guide("2,048 triplets, cached embeddings, nothing fitted or watched", "2.5 to 3 GB of GPU memory in all"),
    "forecast": Guide(
        "20-40 % utilisation, 500-1,000 samples/s, 50-100 ms a step",
        "80-95 %, 3,000-5,000 samples/s, 10-20 ms a step, with a larger batch and model",
    ),
    "restoration": Guide("20 % utilisation", "75-85 %, 2-5 times as fast, with a larger batch and model"),
    "hyperspectral": Guide("9-90 % in swings of 9-10 s, 36-49 % on average", "75-95 %, swings under 2 s"),
    "speech": Guide(
        "8 workers, prefetch 2, not persistent, a copy that blocks",
        "pin_memory 2-3 times, non_blocking 10-30 % of utilisation, prefetch 20-30 %, persistent workers 10-20 % of "
        "the time between epochs",
    ),
}


@dataclass
class Step:
    """A configuration that was run."""

    followed: str
    """The finding that led to it."""
    typed: list[str]
    figures: dict[str, Any]
    folder: Path = field(repr=False)
    findings: list[dict[str, Any]] = field(repr=False, default_factory=list)
    is_kept: bool = True


class Runner:
    """Runs `src/train.py` as a user types it; every run has a folder of its own."""

    def __init__(self, workload: str, where: str, steps: int, folder: Path, variables: Mapping[str, str]) -> None:
        self._workload, self._where, self._steps, self._folder = workload, where, steps, folder
        self._variables, self._number = variables, 0

    def run(self, typed: Sequence[str]) -> tuple[Path, RunRecord]:
        self._number += 1
        place = self._folder / f"{self._number:02d}"
        device = "cpu" if self._where == "cpu" else "gpu"
        words = [
            *(f"workload={self._workload}", f"experiment={self._workload}_starved", "telemetry=default"),
            *(f"trainer.max_steps={self._steps}", "trainer.max_epochs=null", f"trainer.accelerator={device}"),
            *("logger=none", "telemetry.interval_s=0.1", f"hydra.run.dir={place}"),
            *(f"paths.cache_dir={self._folder}/cache", *typed),
        ]
        done = subprocess.run(
            [sys.executable, str(ROOT / "src" / "train.py"), *words],
            env={**os.environ, **self._variables},
            cwd=self._folder,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(words)}\nended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr}")
        return place, RunRecord.read(place)


def figures_of(record: RunRecord) -> dict[str, Any]:
    """What is shown of a run."""
    gpu = record.gpus.get("0", {})
    rate = (record.throughput or {}).get("samples_per_s")
    epoch_samples = record.samples / record.epochs if record.epochs else None
    return {
        "samples_per_s": rate,
        "epoch_s": epoch_samples / rate if rate and epoch_samples else None,
        "step_ms": (record.time or {}).get("step_ms_mean"),
        "readiness_frac": record.readiness_frac,
        "util_pct_mean": gpu.get("util_pct", {}).get("mean"),
        "util_pct_p5": gpu.get("util_pct", {}).get("p5"),
        "util_pct_p95": gpu.get("util_pct", {}).get("p95"),
        "swing_s": (record.swing or {}).get("period_s"),
        "findings": [finding["id"] for finding in record.findings],
    }


def follow(runner: Runner) -> Iterator[Step]:
    """The start, then what each finding leads to; those that were taken back among them."""
    folder, record = runner.run([])
    best = Step("the guide's start", [], figures_of(record), folder, [*record.findings])
    yield best
    tried: set[tuple[str, ...]] = set()
    for _ in range(MOST_STEPS):
        change = next(
            (
                (finding["id"], finding["change"])
                for finding in best.findings
                if finding["change"] and not finding["changes_learning"] and tuple(finding["change"]) not in tried
            ),
            None,
        )
        if change is None:
            return
        tried.add(tuple(change[1]))
        typed = changed(best.typed, change[1])
        folder, record = runner.run(typed)
        step = Step(change[0], typed, figures_of(record), folder, [*record.findings])
        step.is_kept = step.figures["samples_per_s"] >= SLOWER * best.figures["samples_per_s"]
        best = step if step.is_kept else best
        yield step


def changed(typed: Sequence[str], change: Sequence[str]) -> list[str]:
    """The words with those of a finding; a knob that comes again has the later value."""
    knobs = {word.partition("=")[0] for word in change}
    return [*(word for word in typed if word.partition("=")[0] not in knobs), *change]


def table(steps: Sequence[Step], guide: Guide) -> Iterator[str]:
    """A line a run."""
    heads = ("samples/s", "epoch", "step", "ready", "util", "p5-p95", "swing", "followed: typed")
    yield "{:>11} {:>9} {:>9} {:>6} {:>5} {:>8} {:>6}  {}".format(*heads)
    for step in steps:
        one = step.figures
        cells = (
            f"{one['samples_per_s']:,.0f}",
            "-" if one["epoch_s"] is None else f"{one['epoch_s']:,.1f} s",
            "-" if one["step_ms"] is None else f"{one['step_ms']:,.1f} ms",
            "-" if one["readiness_frac"] is None else f"{one['readiness_frac']:.0%}",
            "-" if one["util_pct_mean"] is None else f"{one['util_pct_mean']:.0f} %",
            "-" if one["util_pct_p5"] is None else f"{one['util_pct_p5']:.0f}-{one['util_pct_p95']:.0f}",
            "-" if one["swing_s"] is None else f"{one['swing_s']:.1f} s",
        )
        end = "" if step.is_kept else "   (slower: taken back)"
        said = f"{step.followed}: {' '.join(step.typed) or '-'}{end}"
        yield "{:>11} {:>9} {:>9} {:>6} {:>5} {:>8} {:>6}  {}".format(*cells, said)
        yield f"{'':>11} findings: {', '.join(one['findings']) or 'none'}"
    yield f"The guide says: before {guide.before}; after {guide.after}."


def in_turns(runner: Runner, start: Step, end: Step, rounds: int) -> dict[str, Any]:
    """Rates of both configurations, run one after the other in each round, the order changing."""
    rates: dict[str, list[float]] = {"before": [], "after": []}
    for number in range(rounds):
        pair = [("before", start.typed), ("after", end.typed)]
        for name, typed in pair if number % 2 == 0 else reversed(pair):
            rates[name].append(figures_of(runner.run(typed)[1])["samples_per_s"])
    ratios = [after / before for before, after in zip(rates["before"], rates["after"], strict=True)]
    summary: dict[str, Any] = {"n": rounds, **rates, "ratios": ratios, "ratio_median": statistics.median(ratios)}
    if rounds > 1:
        summary["ratio_sd"] = statistics.stdev(ratios)
    return summary


@contextlib.contextmanager
def machine(where: str, folder: Path) -> Iterator[dict[str, str]]:
    """Variables that a run needs to see its card."""
    variables = {"OMP_NUM_THREADS": "1"}
    if where == "cpu":
        yield {**variables, "CUDA_VISIBLE_DEVICES": ""}
    elif where == "gpu":
        yield {}
    else:
        compile_driver()
        yield {**variables, **machine_environment(FakeDriver(Path("cc"), folder), folder, Cards(**CARD))}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("workload", choices=GUIDES)
    parser.add_argument("--where", choices=("cpu", "simulated", "gpu"), default="cpu")
    parser.add_argument("--steps", type=int, default=200, help="of each run (default 200)")
    parser.add_argument("--rounds", type=int, default=5, help="of the two configurations in turns (default 5)")
    parser.add_argument("--out", type=Path, help="file of the record")
    parser.add_argument("--folder", type=Path, help="where runs and page go (default: logs/<workload>/before_after)")
    asked = parser.parse_args()
    at = datetime.now(UTC)
    folder = (asked.folder or Path("logs") / asked.workload / "before_after" / f"{at:%Y-%m-%d_%H-%M-%S}").resolve()
    folder.mkdir(parents=True)
    guide = GUIDES[asked.workload]
    with machine(asked.where, folder) as variables:
        runner = Runner(asked.workload, asked.where, asked.steps, folder, variables)
        steps = []
        for step in follow(runner):
            steps.append(step)
            print(
                f"{step.followed}: {' '.join(step.typed) or '-'}: {step.figures['samples_per_s']:,.0f} samples/s",
                flush=True,
            )
        end = [step for step in steps if step.is_kept][-1]
        compared = in_turns(runner, steps[0], end, asked.rounds) if asked.rounds and end is not steps[0] else {}
    print("\n".join(["", *table(steps, guide)]))
    if compared:
        both = Comparison(Evidence.read(steps[0].folder), Evidence.read(end.folder))
        page = write_comparison(both, folder, ["before", "after"])
        print(f"In turns, {compared['n']} times: {compared['ratio_median']:.2f} times the rate. Page: {page}")
    won = f"{compared['ratio_median']:.2f} times the rate" if compared else "nothing was won, or nothing run in turns"
    if asked.out is not None:
        record = {
            "theme": f"before_after_{asked.workload}",
            "date": f"{at:%Y-%m-%d %H:%M}",
            "command": f"python benchmarks/before_after.py {' '.join(sys.argv[1:])}",
            "git": git_state(ROOT),
            "machine": RunRecord.read(end.folder).machine,
            "config": {
                "where": asked.where,
                "steps": asked.steps,
                "card": CARD if asked.where == "simulated" else None,
            },
            "results": [
                {"followed": step.followed, "typed": step.typed, "kept": step.is_kept, **step.figures} for step in steps
            ],
            "guide": {"before": guide.before, "after": guide.after},
            "raw": compared,
            "says": f"Following the findings from {asked.workload}_starved on: {won}.",
        }
        asked.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
