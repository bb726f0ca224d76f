"""How often does the 95 % interval of samples/s hold the true rate, and how wide is it? On made-up step times.

    python benchmarks/interval_coverage.py [--runs 2000] [--out RECORD]

Step times are a first-order autoregressive series around a known mean; ``autocorrelation`` is that of successive steps,
``relative_sd`` their standard deviation over the mean. Three methods see the same series:

- blocks: up to 20 blocks of at least 5 steps, taken for independent (the project's own until it was measured here);
- steps: all steps taken for independent;
- interval: `wellfed.observe.timing.interval`.

First with a fixed number of steps; then as in a trial of a sweep, which is looked at from 40 steps on, more and more
rarely, and ends where the half width is within 2 % of the rate, or at the last step. Widths are half widths over the
rate. Nothing is timed: the record depends on the seed alone, not on the machine.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src")]

from measuring import write_record  # noqa: E402

from wellfed.observe.hardware.detect import machine  # noqa: E402
from wellfed.observe.timing.interval import MIN_STEPS, half_width, student_t_975  # noqa: E402
from wellfed.record import git_state  # noqa: E402

SAMPLES, MEAN_S, WITHIN = 32, 0.01, 0.02
AUTOCORRELATIONS = (0.0, 0.5, 0.9, 0.98)
STEPS = (40, 60, 100, 200, 400, 1000)
LIMITS = (200, 1000)
RELATIVE_SDS = (0.02, 0.05, 0.1)

HalfWidth = Callable[[Sequence[float], Sequence[float]], float | None]


def of_blocks(samples: Sequence[float], times_s: Sequence[float]) -> float:
    """Half the interval from blocks that are taken for independent."""
    return _of_independent(samples, times_s, min(20, len(times_s) // 5))


def of_steps(samples: Sequence[float], times_s: Sequence[float]) -> float:
    """Half the interval from steps that are taken for independent."""
    return _of_independent(samples, times_s, len(times_s))


def _of_independent(samples: Sequence[float], times_s: Sequence[float], blocks: int) -> float:
    edges = [round(block * len(times_s) / blocks) for block in range(blocks + 1)]
    rate = sum(samples) / sum(times_s)
    errors = [sum(samples[low:high]) - rate * sum(times_s[low:high]) for low, high in pairwise(edges)]
    return student_t_975(blocks - 1) * statistics.stdev(errors) * math.sqrt(blocks) / sum(times_s)


METHODS: dict[str, HalfWidth] = {"blocks": of_blocks, "steps": of_steps, "interval": half_width}


def series(runs: int, steps: int, autocorrelation: float, relative_sd: float, seed: int) -> list[list[float]]:
    """Step times of each run, seconds."""
    draw = np.random.default_rng(seed).standard_normal((runs, steps))
    rest = math.sqrt(1 - autocorrelation**2)
    for step in range(1, steps):
        draw[:, step] = autocorrelation * draw[:, step - 1] + rest * draw[:, step]
    return (MEAN_S * (1 + relative_sd * draw)).tolist()  # type: ignore[no-any-return]


def look(method: HalfWidth, times_s: Sequence[float]) -> tuple[bool, float]:
    """Whether the interval holds the true rate, and its half width over the rate found."""
    samples = [SAMPLES] * len(times_s)
    half, rate = method(samples, times_s), sum(samples) / sum(times_s)
    assert half is not None
    return abs(rate - SAMPLES / MEAN_S) <= half, half / rate


def looks(limit: int) -> Iterator[int]:
    """The steps after which a trial is looked at."""
    steps = MIN_STEPS
    while steps < limit:
        yield steps
        steps += steps // 4
    yield limit


def until_known(method: HalfWidth, times_s: Sequence[float]) -> tuple[bool, float, int]:
    """As `look`, where a trial ends, and the steps that it has taken."""
    for steps in looks(len(times_s)):
        holds, width = look(method, times_s[:steps])
        if width <= WITHIN:
            break
    return holds, width, steps


def fixed(runs: int) -> Iterator[dict[str, Any]]:
    """Coverage with a number of steps that is settled beforehand."""
    for steps in STEPS:
        for autocorrelation in AUTOCORRELATIONS:
            all_times_s = series(runs, steps, autocorrelation, 0.1, seed=steps)
            for name, method in METHODS.items():
                found = [look(method, times_s) for times_s in all_times_s]
                yield {
                    "stops": "after n steps",
                    "steps": steps,
                    "autocorrelation": autocorrelation,
                    "relative_sd": 0.1,
                    "method": name,
                    **_summary([(holds, width, steps) for holds, width in found]),
                }


def stopped(runs: int) -> Iterator[dict[str, Any]]:
    """Coverage where a trial ends as soon as its rate is known within 2 %."""
    for limit in LIMITS:
        for autocorrelation in AUTOCORRELATIONS:
            for relative_sd in RELATIVE_SDS:
                all_times_s = series(runs, limit, autocorrelation, relative_sd, seed=limit)
                for name, method in METHODS.items():
                    yield {
                        "stops": "when within 2 %",
                        "steps": limit,
                        "autocorrelation": autocorrelation,
                        "relative_sd": relative_sd,
                        "method": name,
                        **_summary([until_known(method, times_s) for times_s in all_times_s]),
                    }


def _summary(found: Sequence[tuple[bool, float, int]]) -> dict[str, Any]:
    coverage = statistics.fmean(holds for holds, _, _ in found)
    return {
        "n": len(found),
        "coverage_frac": round(coverage, 4),
        "coverage_frac_sd": round(math.sqrt(coverage * (1 - coverage) / len(found)), 4),
        "half_width_frac_mean": round(statistics.fmean(width for _, width, _ in found), 5),
        "steps_taken_mean": round(statistics.fmean(steps for _, _, steps in found), 1),
    }


def says(results: Sequence[dict[str, Any]]) -> str:
    """The least coverage of each method, up to an autocorrelation of 0.9."""
    worst = {
        name: min(row["coverage_frac"] for row in results if row["method"] == name and row["autocorrelation"] <= 0.9)
        for name in METHODS
    }
    told = ", ".join(f"{name} {100 * least:.1f} %" for name, least in worst.items())
    return f"Least coverage of a 95 % interval at autocorrelations up to 0.9, stopping rule included: {told}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    results = [*fixed(chosen.runs), *stopped(chosen.runs)]
    for row in results:
        print(
            f"{row['stops']:16} {row['steps']:5} autocorrelation {row['autocorrelation']:4} sd {row['relative_sd']:4} "
            f"{row['method']:9} coverage {row['coverage_frac']:.3f} half width {row['half_width_frac_mean']:.4f} "
            f"after {row['steps_taken_mean']:.0f} steps"
        )
    print(says(results))
    if chosen.out:
        facts = machine(None).to_dict()
        git = git_state(ROOT)
        record = {
            "theme": "interval_coverage",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": f"python benchmarks/interval_coverage.py --runs {chosen.runs} --out RECORD",
            "git": git and {"commit": git["commit"], "dirty": git["dirty"]},
            "machine": {name: facts[name] for name in ("cpu", "cpu_quota_cores", "ram_gib", "gpus", "versions")},
            "config": {
                "autocorrelation": AUTOCORRELATIONS,
                "steps": STEPS,
                "limits": LIMITS,
                "relative_sd": RELATIVE_SDS,
                "within_frac": WITHIN,
                "mean_step_s": MEAN_S,
                "methods": list(METHODS),
            },
            "results": results,
            "raw": "not kept: made again by the command, whose seeds are fixed",
            "says": says(results),
        }
        write_record(record, chosen.out)


if __name__ == "__main__":
    main()
