"""How much faster is the same job on several devices? Rates, efficiency, and what the ranks do together.

    python benchmarks/scaling.py --devices 1,2,4 [--where cpu|simulated|gpu] [--workload recsys] [--out RECORD]
    python benchmarks/scaling.py --devices 1,2 -- memory.on_oom=fail loader.backend=inline

Runs ``src/train.py trainer=ddp trainer.devices=N`` in turns: with the workload's effective batch on all counts (strong
scaling: each device has less to do in a step), and with as many samples a device as one device has alone (weak scaling,
which learns from larger steps). What stands behind ``--`` is typed behind each of them.

Measured, on every rank, in the steps of the job itself (`scaling_rank.py`):

- samples/s (run.json), and the efficiency: over N times the rate of one device in the same round;
- gradients: time in `AgreeingReplicas.average_gradients`, on a GPU of the device's stream, until the sums are there.
  Whoever comes first waits for the last in it. With memory.on_oom=fail DDP sums during the backward pass, and it is
  not seen;
- agreements: time of the host in the questions that all ranks answer together. On a CPU the wait for slower ranks is
  in here, on a GPU the device may be at work meanwhile;
- alone: the same number of bytes summed in the same pieces by the same ranks when nobody is waited for, in a step of
  the warm-up. Not a part of the step: what the exchange would take if all came at once.

On a CPU the ranks are processes that talk by Gloo, and share its cores, caches and memory: N ranks on fewer than 2 N
cores compete with their own loaders and with Gloo's threads, and the product refuses more ranks than cores. Simulated
cards (tests/fake_cuda, which computes nothing here) exchange by Gloo over this host's memory in place of NCCL, and the
ranks' Python shares this host's cores: what is to be seen is that the job's own work grows as it should, no rate of
any real card or link.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.before_after import GUIDES, card_of, changed, machine  # noqa: E402
from benchmarks.measuring import finish  # noqa: E402
from wellfed.record import RunRecord  # noqa: E402

TIMEOUT_S = 900
RANK = ROOT / "benchmarks" / "scaling_rank.py"
CALLED = {"cpu": "of a CPU", "simulated": "simulated", "gpu": "GPUs"}


@dataclass(frozen=True)
class Case:
    """A number of devices with its effective batch."""

    kind: str
    """strong, weak, or both: one device is the start of either."""
    devices: int
    effective: int

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.devices}"


def cases(devices: Sequence[int], effective: int) -> list[Case]:
    """All there are to run, one device first."""
    several = sorted({count for count in devices if count > 1})
    strong = [Case("strong", count, effective) for count in several]
    weak = [Case("weak", count, effective * count) for count in several]
    return [Case("both", 1, effective), *strong, *weak]


class Refused(Exception):
    """The product says why it does not run this."""


@dataclass(frozen=True)
class Ran:
    """Figures of one run."""

    figures: dict[str, Any]
    machine: Any


class Runner:
    """Runs the job; every run has a folder of its own."""

    def __init__(self, asked: argparse.Namespace, folder: Path, variables: dict[str, str]) -> None:
        self._asked, self._folder, self._number = asked, folder, 0
        self._variables = variables

    def run(self, case: Case) -> Ran:
        """
        Raises:
            Refused: exit code 2.
        """
        self._number += 1
        asked, place = self._asked, self._folder / f"{self._number:03d}"
        notes = place.with_suffix(".ranks")
        notes.mkdir()
        steps = asked.steps
        words = changed(
            [
                *(f"workload={asked.workload}", "trainer=ddp", f"trainer.devices={case.devices}"),
                *(f"trainer.max_steps={steps}", "trainer.max_epochs=null", f"trainer.validate_every_steps={steps}"),
                *(f"trainer.checkpoint_every_steps={steps}", "trainer.sanity_batches=0"),
                f"trainer.accelerator={'cpu' if asked.where == 'cpu' else 'gpu'}",
                *(f"workload.effective_batch_size={case.effective}", "telemetry.ceiling_steps=0", "logger=none"),
                *("telemetry.interval_s=0.1", f"hydra.run.dir={place}", f"paths.cache_dir={self._folder}/cache"),
            ],
            asked.overrides,
        )
        if case.devices == 1:
            words.append("trainer.strategy=auto")
        done = subprocess.run(
            [sys.executable, str(RANK), *words],
            env={**os.environ, **self._variables, "WELLFED_SCALING": str(notes)},
            cwd=self._folder,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if done.returncode == 2:
            raise Refused(done.stderr.strip())
        if done.returncode:
            raise SystemExit(f"{' '.join(words)}\nended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr}")
        ranks = [json.loads(path.read_text(encoding="utf-8")) for path in notes.glob("rank*.json")]
        record = RunRecord.read(place)
        return Ran(figures_of(case, record, sorted(ranks, key=lambda one: one["rank"])), record.machine)


def figures_of(case: Case, record: RunRecord, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is shown of a run: times are means over the steps after the warm-up and over all ranks."""
    if len(ranks) != case.devices:
        raise SystemExit(f"{case.devices} ranks were started, and {len(ranks)} left their figures.")
    steps = [step for rank in ranks for step in rank["steps"]]
    if not steps:
        raise SystemExit("All steps belong to the warm-up: set more --steps.")
    total_ms = sum(step["step_ms"] for step in steps)
    is_seen = record.plan["memory.on_oom"]["value"] == "retry" and case.devices > 1
    utils = [figures["util_pct"]["mean"] for figures in record.gpus.values() if "util_pct" in figures]
    alone = [statistics.median(rank["alone_ms"]) for rank in ranks if rank["alone_ms"]]
    return {
        "samples_per_s": (record.throughput or {}).get("samples_per_s"),
        "step_ms": total_ms / len(steps),
        "wait_frac_by_rank": [_share(rank, "wait_ms") for rank in ranks],
        "readiness_frac_by_rank": [statistics.fmean(step["ready"] for step in rank["steps"]) for rank in ranks],
        "util_pct_by_gpu": utils,
        "cpu_pct_rank_0": record.host.get("cpu_pct"),
        "gradients_ms": sum(step["gradients_ms"] for step in steps) / len(steps) if is_seen else None,
        "gradients_frac": sum(step["gradients_ms"] for step in steps) / total_ms if is_seen else None,
        "agreements_ms": sum(step["agreements_ms"] for step in steps) / len(steps) if case.devices > 1 else None,
        "agreements_frac": sum(step["agreements_ms"] for step in steps) / total_ms if case.devices > 1 else None,
        "alone_ms": statistics.fmean(alone) if alone else None,
        "calls_per_step": ranks[0]["calls_per_step"] if case.devices > 1 else None,
        "gradient_bytes": ranks[0]["gradient_bytes"] if case.devices > 1 else None,
        "backend": ranks[0]["backend"],
        "micro_batch": record.plan["memory.micro_batch"]["value"],
        "loader": f"{record.plan['loader.backend']['value']}, {record.plan['loader.num_workers']['value']} workers",
    }


def _share(rank: dict[str, Any], name: str) -> float:
    return float(sum(step[name] for step in rank["steps"]) / sum(step["step_ms"] for step in rank["steps"]))


def in_turns(runner: Runner, asked: Sequence[Case], rounds: int) -> tuple[dict[Case, list[Ran]], dict[Case, str]]:
    """All cases once in each round, every other one backwards; and what was refused, with its reason."""
    found: dict[Case, list[Ran]] = {case: [] for case in asked}
    refused: dict[Case, str] = {}
    for number in range(rounds):
        order = list(asked) if number % 2 == 0 else list(reversed(asked))
        for case in order:
            if case in refused:
                continue
            try:
                found[case].append(runner.run(case))
            except Refused as error:
                refused[case] = str(error)
                print(f"{case.name}: refused: {error}", flush=True)
                continue
            print(
                f"round {number + 1}, {case.name}: {found[case][-1].figures['samples_per_s']:,.0f} samples/s",
                flush=True,
            )
    return {case: ran for case, ran in found.items() if ran}, refused


def result_of(case: Case, ran: Sequence[Ran], alone: Sequence[Ran]) -> dict[str, Any]:
    """Figures over all rounds; the efficiency is of each round's own two runs."""
    rates = [one.figures["samples_per_s"] for one in ran]
    ratios = [rate / (case.devices * one.figures["samples_per_s"]) for rate, one in zip(rates, alone, strict=True)]
    found: dict[str, Any] = {"kind": case.kind, "devices": case.devices, "effective_batch_size": case.effective}
    found |= {"n": len(ran), "samples_per_s_mean": statistics.fmean(rates), **_sd("samples_per_s", rates)}
    found |= {
        "efficiency_median": statistics.median(ratios),
        "efficiency_by_round": ratios,
        **_sd("efficiency", ratios),
    }
    for name in ("step_ms", "gradients_ms", "gradients_frac", "agreements_ms", "agreements_frac", "alone_ms"):
        values = [one.figures[name] for one in ran]
        found[name] = None if None in values else statistics.fmean(values)
    for name in ("readiness_frac_by_rank", "wait_frac_by_rank", "util_pct_by_gpu"):
        found[name] = [statistics.fmean(values) for values in zip(*(one.figures[name] for one in ran), strict=True)]
    for name in ("calls_per_step", "gradient_bytes", "backend"):
        found[name] = ran[0].figures[name]
    return found


def _sd(name: str, values: Sequence[float]) -> dict[str, float]:
    return {f"{name}_sd": statistics.stdev(values)} if len(values) > 1 else {}


def table(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yields a line for each case."""
    line = "{:>9} {:>7} {:>9} {:>12} {:>11} {:>9} {:>15} {:>15} {:>9} {:>11} {:>11}"
    heads = ("", "devices", "a step", "samples/s", "efficiency", "step", "gradients", "agreements", "alone")
    yield line.format(*heads, "ready", "util")
    for one in results:
        yield line.format(
            one["kind"],
            one["devices"],
            f"{one['effective_batch_size']:,}",
            f"{one['samples_per_s_mean']:,.0f}",
            f"{one['efficiency_median']:.2f}",
            _ms(one["step_ms"]),
            _with_share(one, "gradients"),
            _with_share(one, "agreements"),
            _ms(one["alone_ms"]),
            _span([100 * value for value in one["readiness_frac_by_rank"]]),
            _span(one["util_pct_by_gpu"]),
        )


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} ms"


def _with_share(one: dict[str, Any], name: str) -> str:
    share = one[f"{name}_frac"]
    return "-" if share is None else f"{_ms(one[f'{name}_ms'])} {share:.0%}"


def _span(values: Sequence[float]) -> str:
    """Lowest and highest rank."""
    return "-" if not values else f"{min(values):.0f}-{max(values):.0f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", default="1,2", help="numbers of devices, as 1,2,4 (1 is always among them)")
    parser.add_argument("--where", choices=("cpu", "simulated", "gpu"), default="cpu")
    parser.add_argument("--workload", default="recsys")
    parser.add_argument("--batch", type=int, help="samples of a step on one device (default: the workload's)")
    parser.add_argument("--steps", type=int, default=60, help="of each run (default 60)")
    parser.add_argument("--rounds", type=int, default=5, help="of all cases in turns (default 5)")
    parser.add_argument("--card-share", type=float, help="speed of a simulated card (default: by workload)")
    parser.add_argument("--out", type=Path, help="file of the record")
    parser.add_argument("--folder", type=Path, help="where the runs go (default: logs/<workload>/scaling)")
    parser.add_argument("overrides", nargs="*", metavar="-- OVERRIDE", help="typed behind each run")
    asked = parser.parse_args()
    devices = sorted({1, *(int(count) for count in asked.devices.split(","))})
    at = datetime.now(UTC)
    folder = (asked.folder or Path("logs") / asked.workload / "scaling" / f"{at:%Y-%m-%d_%H-%M-%S}").resolve()
    folder.mkdir(parents=True)
    guide = GUIDES.get(asked.workload)
    card = card_of(asked.card_share or (guide.card_share if guide else 0.1), guide.kernel_share if guide else None)
    card |= {"cards": devices[-1]}
    effective = asked.batch or _own_batch(asked.workload)
    with machine(asked.where, card, folder) as variables:
        found, refused = in_turns(Runner(asked, folder, variables), cases(devices, effective), asked.rounds)
    alone = next((ran for case, ran in found.items() if case.devices == 1), None)
    if alone is None:
        raise SystemExit("\n".join(refused.values()))
    results = [result_of(case, ran, alone) for case, ran in found.items()]
    print("\n".join(["", *table(results)]))
    config = {
        "where": asked.where,
        "is_simulated": asked.where == "simulated",
        "card": card if asked.where == "simulated" else None,
        "steps": asked.steps,
        "cores": len(os.sched_getaffinity(0)),
        "overrides": asked.overrides,
        "threads_of_a_rank": variables.get("OMP_NUM_THREADS"),
        "refused": {case.name: reason for case, reason in refused.items()},
    }
    said = says(results, asked.where, refused)
    finish(f"scaling_{asked.workload}", results, said, asked.out, config=config, machine=alone[0].machine)


def says(results: Sequence[dict[str, Any]], where: str, refused: dict[Case, str]) -> str:
    """Returns the finding in a sentence."""
    parts = []
    for one in results:
        if one["devices"] > 1:
            of_one = f"{one['efficiency_median']:.2f} of {one['devices']} times the rate of one"
            share = one["gradients_frac"]
            exchange = "" if share is None else f", {share:.0%} of a step in the exchange of gradients"
            parts.append(f"{one['kind']} scaling, {one['devices']} devices: {of_one}{exchange}")
    parts += [f"{case.name} devices: refused" for case in refused]
    return f"Devices {CALLED[where]}: {'; '.join(parts)}."


def _own_batch(workload: str) -> int:
    from wellfed.config.compose import compose

    return int(compose([f"workload={workload}"]).config.workload.samples_per_step)


if __name__ == "__main__":
    main()
