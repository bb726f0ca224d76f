"""What do the findings win for somebody who starts where a guide does? Follows them, step by step, and measures.

    make before-after W=recsys
    python benchmarks/before_after.py forecast [--where cpu|simulated|gpu] [--steps 300] [--rounds 5] [--out RECORD]

Begins with ``experiment=<workload>_starved``. What the first finding says to type is typed, unless it would change what
is learned; a change that makes the run no faster is taken back, and the next finding is followed. What the guide itself
advises is tried too, each piece alone from the same start. Then all of them run in turns, and the page of the first and
the last configuration (report A B) has both curves of utilisation; a much faster one runs as long as the first for it.
``simulated`` is a simulated card behind real loaders (tests/fake_cuda). It computes nothing, and its rates are chosen
by guide so that its steps wait as the guide's did: its figures are of no real GPU, and of no learning.
"""

from __future__ import annotations

import argparse
import contextlib
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

from benchmarks.measuring import finish  # noqa: E402
from tests.fake_cuda.machine import MODELS, Cards, compile_driver, machine_environment  # noqa: E402
from tests.fake_nvml.driver import FakeDriver  # noqa: E402
from wellfed.explain.diagnosis.evidence import Evidence  # noqa: E402
from wellfed.explain.report.comparison import Comparison  # noqa: E402
from wellfed.explain.report.write import write_comparison  # noqa: E402
from wellfed.record.entries import RunRecord  # noqa: E402

MOST_STEPS, LEAST_GAIN = 8, 1.02
"""Findings that are followed at most; a change that makes a run faster by less is taken back."""
LEAST_LONGER = 3
"""The last configuration is run again, for as long as the first one took, where it is so many times as fast."""
NOT_SIMULATED = "gpu.compile"
"""Knobs without effect on a simulated card, where noise would decide."""
CALLED = {"cpu": "", "simulated": ", on a simulated card", "gpu": ", on a GPU"}
TIMEOUT_S = 900
CARD: dict[str, Any] = {"mib": 24576, "context_mib": 500, "copy_gbps": 12.0, "pageable_gbps": 4.0, **MODELS["fast"]}


@dataclass(frozen=True)
class Advice:
    """Advice of a guide."""

    claim: str
    typed: tuple[str, ...]
    is_learning: bool = False
    """It changes the model or what a step learns from; too much for a CPU, where it is left out."""
    is_of_copy: bool = False
    """It is about the copy to the card, which a CPU does not have."""


@dataclass(frozen=True)
class Guide:
    """Claims of a published guide about its system."""

    before: str
    after: str
    advice: tuple[Advice, ...]
    card_share: float
    """Share of the rates of CARD, so that the card waits for this computer as long as the guide says."""
    kernel_share: float | None = None
    """Of the speed of its shortest kernels; None = `card_share`. They decide where a step is in small parts."""
    start: tuple[str, ...] = ()
    """What the start has beyond its experiment, but on a CPU, for which it is too much."""
    steps: int = 300
    cpu_steps: int = 100


GUIDES = {
    "recsys": Guide(
        "2,048 triplets a step, cached embeddings, nothing fitted or watched",
        "2.5 to 3 GB of GPU memory in all",
        (
            Advice("8 GB: 1,024 triplets", ("workload.effective_batch_size=1024",), is_learning=True),
            Advice(
                "under 4 GB: 512 triplets, embeddings computed anew",
                ("workload.effective_batch_size=512", "memory.features=dynamic"),
                is_learning=True,
            ),
        ),
        card_share=0.008,
        steps=100,
        cpu_steps=60,
    ),
    "forecast": Guide(
        "20-40 % utilisation, 500-1,000 samples/s, 50-100 ms a step",
        "80-95 %, 3,000-5,000 samples/s, 10-20 ms a step",
        (
            Advice("LSTM of 3 layers of 256, batch 512, 30 to 90 days", ("experiment=forecast_fed",), is_learning=True),
            Advice("the larger batch alone", ("workload.effective_batch_size=512",), is_learning=True),
        ),
        card_share=0.36,
        steps=600,
    ),
    "restoration": Guide(
        "20 % utilisation",
        "75 % (12 GB) to 85 % (24 GB), 2-5 times as fast",
        (
            Advice("12 GB: its light file", ("experiment=restoration_light",), is_learning=True),
            Advice("16 GB: its balanced file, 80 %", ("experiment=restoration_balanced",), is_learning=True),
            Advice(
                "24 GB: its high file, 85 %", ("experiment=restoration_high", "trainer.max_steps=100"), is_learning=True
            ),
        ),
        card_share=6.0,
        # Four times the batch of its high file: fewer take as long to launch here as to load. Longer epochs.
        start=("workload.effective_batch_size=256", "workload.data.patches_per_image=256"),
        steps=500,
        cpu_steps=200,
    ),
    "hyperspectral": Guide(
        "9-90 % in swings of 9-10 s, 36-49 % on average",
        "75-95 %, swings under 2 s, 3-4 times as fast",
        (
            Advice(
                "workers = min(cpus / 2, 8, 2 x GPUs), prefetch 2, persistent, timeout 60 s",
                (
                    f"loader.num_workers={max(1, min((os.cpu_count() or 2) // 2, 8, 2))}",
                    *("loader.prefetch_factor=2", "loader.persistent_workers=true", "loader.timeout_s=60"),
                ),
            ),
            Advice("persistent workers alone", ("loader.persistent_workers=true",)),
        ),
        card_share=0.055,
        cpu_steps=200,
    ),
    "speech": Guide(
        "8 workers, prefetch 2, not persistent, a copy that blocks; under 10 ms a batch of 8",
        "pinned memory 2-3 times, non_blocking 10-30 % of utilisation, prefetch 20-30 %, persistent workers 10-20 %",
        (
            Advice("pinned memory: 2-3 times. Here without it", ("loader.pin_memory=false",), is_of_copy=True),
            Advice("non_blocking: 10-30 % of utilisation", ("loader.device_prefetch=2",), is_of_copy=True),
            Advice("prefetch 4: 20-30 %", ("loader.prefetch_factor=4",)),
            Advice("persistent workers: 10-20 % of the time between epochs", ("loader.persistent_workers=true",)),
        ),
        card_share=0.03,
        kernel_share=1.0,
        # With 32 clips a step that is fed takes as long to launch as to compute. More clips for longer epochs.
        start=("workload.effective_batch_size=128", "workload.data.num_clips=4000"),
        steps=100,
        cpu_steps=100,
    ),
}


@dataclass
class Step:
    """A configuration that was run."""

    why: str
    """The finding or the claim that led to it."""
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

    def run(self, why: str, typed: Sequence[str], times: int = 1) -> Step:
        """``times``: as many steps as in other runs."""
        self._number += 1
        steps = times * self._steps
        place = self._folder / f"{self._number:02d}"
        device = "cpu" if self._where == "cpu" else "gpu"
        words = changed(
            [
                *(f"workload={self._workload}", f"experiment={self._workload}_starved", "telemetry=default"),
                *(f"trainer.max_steps={steps}", "trainer.max_epochs=null", f"trainer.accelerator={device}"),
                *("logger=none", "telemetry.interval_s=0.1", f"hydra.run.dir={place}"),
                *(f"trainer.validate_every_steps={steps}", f"trainer.checkpoint_every_steps={steps}"),
                f"paths.cache_dir={self._folder}/cache",
            ],
            typed,
        )
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
        record = RunRecord.read(place)
        return Step(why, list(typed), figures_of(record), place, [*record.findings])


def figures_of(record: RunRecord) -> dict[str, Any]:
    """Returns the figures of a run for the tables."""
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
        "memory_gib_max": gpu.get("mem_used_gib", {}).get("max"),
        "swing_s": (record.swing or {}).get("period_s"),
        "findings": [finding["id"] for finding in record.findings],
    }


def follow(runner: Runner, start: Sequence[str], beyond: str | None) -> Iterator[Step]:
    """The start, then what each finding leads to; those that were taken back among them.

    Args:
        beyond: a knob that stays as it is.
    """
    best = runner.run("the guide's start", start)
    yield best
    tried: set[tuple[str, ...]] = set()
    for _ in range(MOST_STEPS):
        change = next(
            (
                (finding["id"], finding["change"])
                for finding in best.findings
                if finding["change"]
                and not finding["changes_learning"]
                and tuple(finding["change"]) not in tried
                and not any(word.partition("=")[0] == beyond for word in finding["change"])
            ),
            None,
        )
        if change is None:
            return
        tried.add(tuple(change[1]))
        step = runner.run(change[0], changed(best.typed, change[1]))
        step.is_kept = step.figures["samples_per_s"] >= LEAST_GAIN * best.figures["samples_per_s"]
        best = step if step.is_kept else best
        yield step


def changed(typed: Sequence[str], change: Sequence[str]) -> list[str]:
    """Returns the words with those of a finding; a later value of a knob replaces an earlier one."""
    knobs = {word.partition("=")[0] for word in change}
    return [*(word for word in typed if word.partition("=")[0] not in knobs), *change]


def table(steps: Sequence[Step]) -> Iterator[str]:
    """Two lines a run."""
    heads = ("samples/s", "epoch", "step", "ready", "util", "p5-p95", "swing", "memory", "why: typed")
    yield "{:>11} {:>9} {:>9} {:>6} {:>5} {:>8} {:>6} {:>8}  {}".format(*heads)
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
            "-" if one["memory_gib_max"] is None else f"{one['memory_gib_max']:.1f} GiB",
        )
        end = "" if step.is_kept else "   (no faster: taken back)"
        said = f"{step.why}: {' '.join(step.typed) or '-'}{end}"
        yield "{:>11} {:>9} {:>9} {:>6} {:>5} {:>8} {:>6} {:>8}  {}".format(*cells, said)
        yield f"{'':>11} findings: {', '.join(one['findings']) or 'none'}"


def in_turns(runner: Runner, start: Step, others: Sequence[Step], rounds: int) -> list[dict[str, Any]]:
    """Rates of the others beside the start's; all of them run once in each round, every other one backwards."""
    all_steps = [start, *others]
    rates: list[list[float]] = [[] for _ in all_steps]
    for number in range(rounds):
        order = range(len(all_steps)) if number % 2 == 0 else reversed(range(len(all_steps)))
        for index in order:
            ran = runner.run(all_steps[index].why, all_steps[index].typed)
            rates[index].append(ran.figures["samples_per_s"])
    return [compared(step, rates[0], found) for step, found in zip(others, rates[1:], strict=True)]


def compared(step: Step, before: list[float], after: list[float]) -> dict[str, Any]:
    """Returns the median of the ratios of rates, round by round, with the lowest and the highest."""
    ratios = [mine / start for start, mine in zip(before, after, strict=True)]
    found = {"ratio_median": statistics.median(ratios), "ratio_lowest": min(ratios), "ratio_highest": max(ratios)}
    return {"why": step.why, "typed": step.typed, "n": len(ratios), **found}


@contextlib.contextmanager
def machine(where: str, card: Mapping[str, Any], folder: Path) -> Iterator[dict[str, str]]:
    """Variables that a run needs to see its card."""
    variables = {"OMP_NUM_THREADS": "1"}
    if where == "cpu":
        yield {**variables, "CUDA_VISIBLE_DEVICES": ""}
    elif where == "gpu":
        yield {}
    else:
        compile_driver()
        yield {**variables, **machine_environment(FakeDriver(Path("cc"), folder), folder, Cards(**card))}


def card_of(share: float, kernel_share: float | None = None) -> dict[str, Any]:
    """Returns the simulated card at a share of its speed."""
    rates = {name: CARD[name] * share for name in ("tflops", "tensor_tflops", "dram_gbps")}
    return {**CARD, **rates, "kernel_us": CARD["kernel_us"] / (kernel_share or share)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    there = [name for name in GUIDES if (ROOT / "configs" / "experiment" / f"{name}_starved.yaml").exists()]
    parser.add_argument("workload", choices=there)
    parser.add_argument("--where", choices=("cpu", "simulated", "gpu"), default="cpu")
    parser.add_argument("--steps", type=int, help="of each run (default: by guide)")
    parser.add_argument("--rounds", type=int, default=5, help="of all configurations in turns (default 5)")
    parser.add_argument("--no-guide", action="store_true", help="follow the findings alone, not the guide's own advice")
    parser.add_argument("--without", metavar="KNOB", help="a knob that no finding may change, such as gpu.compile")
    parser.add_argument("--card-share", type=float, help="speed of the simulated card (default: by guide)")
    parser.add_argument("--out", type=Path, help="file of the record")
    parser.add_argument("--folder", type=Path, help="where runs and page go (default: logs/<workload>/before_after)")
    asked = parser.parse_args()
    at = datetime.now(UTC)
    folder = (asked.folder or Path("logs") / asked.workload / "before_after" / f"{at:%Y-%m-%d_%H-%M-%S}").resolve()
    folder.mkdir(parents=True)
    guide = GUIDES[asked.workload]
    is_cpu = asked.where == "cpu"
    num_steps = asked.steps or (guide.cpu_steps if is_cpu else guide.steps)
    start = () if is_cpu else guide.start
    card = card_of(asked.card_share or guide.card_share, guide.kernel_share)
    with machine(asked.where, card, folder) as variables:
        runner = Runner(asked.workload, asked.where, num_steps, folder, variables)
        steps = []
        for step in follow(runner, start, NOT_SIMULATED if asked.where == "simulated" else asked.without):
            steps.append(step)
            tell(step)
        end = [step for step in steps if step.is_kept][-1]
        times = round(end.figures["samples_per_s"] / steps[0].figures["samples_per_s"])
        if times >= LEAST_LONGER:  # or its curve would be that of its first moments
            end = runner.run(f"{end.why}, for as long as the start", end.typed, times)
            steps.append(end)
            tell(end)
        advised = []
        for advice in () if asked.no_guide else guide.advice:
            if is_cpu and (advice.is_learning or advice.is_of_copy):
                print(f"{advice.claim}: not run on a CPU", flush=True)
                continue
            has_own = any(word.startswith("experiment=") for word in advice.typed)
            advised.append(runner.run(advice.claim, advice.typed if has_own else changed(start, advice.typed)))
            tell(advised[-1])
        others = [*([end] if end is not steps[0] else []), *advised]
        turns = in_turns(runner, steps[0], others, asked.rounds) if asked.rounds else []
    print("\n".join(["", *table(steps)]))
    if advised:
        print("\n".join(["", "What the guide advises, each alone from its start:", *table(advised)]))
    print(f"The guide says: before {guide.before}; after {guide.after}.")
    for one in turns:
        print(f"In turns, {one['n']} times: {one['ratio_median']:.2f} times the start's rate: {one['why']}")
    if end is not steps[0]:
        both = Comparison(Evidence.read(steps[0].folder), Evidence.read(end.folder))
        print(f"Page: {write_comparison(both, folder, ['before', 'after'])}")
    if asked.out is None:
        return
    won = "nothing was won" if end is steps[0] else "not run in turns"
    if turns and end is not steps[0]:
        won = f"{turns[0]['ratio_median']:.2f} times the rate"
    config = {
        "where": asked.where,
        "is_simulated": asked.where == "simulated",
        "steps": num_steps,
        "card": card if asked.where == "simulated" else None,
    }
    results = [
        {"why": step.why, "typed": step.typed, "by": by, "kept": step.is_kept, **step.figures}
        for by, found in (("findings", steps), ("guide", advised))
        for step in found
    ]
    more = {"machine": RunRecord.read(end.folder).machine, "guide": {"before": guide.before, "after": guide.after}}
    says = f"Following the findings from {asked.workload}_starved on{CALLED[asked.where]}: {won}."
    finish(f"before_after_{asked.workload}", results, says, asked.out, config=config, turns=turns, **more)


def tell(step: Step) -> None:
    print(f"{step.why}: {' '.join(step.typed) or '-'}: {step.figures['samples_per_s']:,.0f} samples/s", flush=True)


if __name__ == "__main__":
    main()
