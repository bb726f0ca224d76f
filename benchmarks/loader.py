"""Batches of recommender triplets: the limit of the memory, the usual way, and our loader.

    python benchmarks/loader.py [--rounds 7] [--out RECORD]

The data are two int64 columns of 1,000,000 rows (users, items) and a random negative for each row.

- limit: `index_select` of both columns and `randint`, the permutation given; no loader at all.
- naive: a Dataset that returns `users[i], items[i], randint`, torch's default collate, DataLoader without workers.
- ours: `train_loader` over data with `fetch`, with all that a run has: Delivery, SampleRng, order of (seed, epoch).

Every round times all of them once, in turns, so that a noisy machine disturbs all alike; a ratio is of one round. The
CPU time of this process is given too, which other processes disturb less. Then the share of time that a device would be
busy: a consumer that sleeps 1 ms a step. Its limit is a list of batches that were built before. One torch thread.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.measuring import compared, finish, interval, ratios, turned  # noqa: E402
from wellfed.data.settings import LoaderSettings  # noqa: E402
from wellfed.data.train_loader import train_loader  # noqa: E402
from wellfed.sample_rng import SampleRng  # noqa: E402

ROWS, USERS, ITEMS = 1_000_000, 100_000, 50_000
BATCHES = (512, 2048, 8192)
STEP_S = 0.001
OURS = {
    "inline": LoaderSettings(),
    "threads": LoaderSettings("threads", num_workers=1, prefetch_factor=8),
}


class Triplets:
    """One sample, or a batch at once."""

    def __init__(self) -> None:
        made = torch.Generator().manual_seed(0)
        self.users = torch.randint(USERS, (ROWS,), generator=made)
        self.items = torch.randint(ITEMS, (ROWS,), generator=made)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.users[index], self.items[index], torch.randint(ITEMS, ())

    def fetch(self, indices: Tensor, rng: SampleRng) -> tuple[Tensor, Tensor, Tensor]:
        users, items = self.users.index_select(0, indices), self.items.index_select(0, indices)
        return users, items, torch.randint(ITEMS, indices.shape, generator=rng)


def limit(data: Triplets, batch: int, order: Tensor) -> Iterator[Any]:
    for start in range(0, ROWS, batch):
        rows = order[start : start + batch]
        users, items = data.users.index_select(0, rows), data.items.index_select(0, rows)
        yield users, items, torch.randint(ITEMS, rows.shape)


def naive(data: Triplets, batch: int) -> Iterator[Any]:
    return iter(DataLoader(data, batch_size=batch, shuffle=True))  # type: ignore[arg-type]


def ours(data: Triplets, batch: int, plan: LoaderSettings) -> Iterator[Any]:
    with closing(train_loader(data, batch_size=batch, seed=0, settings=plan)) as loader:
        yield from loader


def rates(batches: Iterator[Any], batch: int, num: int) -> tuple[float, float]:
    """Samples/s, and per second of CPU time; the first batch, which may start something, is dropped."""
    next(batches)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    count = sum(1 for _ in itertools.islice(batches, num))
    took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    close(batches)
    return count * batch / took_s, count * batch / cpu_s


def rate(batches: Iterator[Any], batch: int, num: int) -> float:
    """Samples/s."""
    return rates(batches, batch, num)[0]


def busy(batches: Iterator[Any], num: int) -> float:
    """Share of the time that the simulated device computes."""
    next(batches)
    computes_s, began_s = 0.0, time.perf_counter()
    for _ in itertools.islice(batches, num):
        step_s = time.perf_counter()
        time.sleep(STEP_S)
        computes_s += time.perf_counter() - step_s
    share = computes_s / (time.perf_counter() - began_s)
    close(batches)
    return share


def close(batches: Iterator[Any]) -> None:
    """Producers stop now, not beside what is timed next."""
    if hasattr(batches, "close"):
        batches.close()


Rates = dict[str, list[float]]


def measure(data: Triplets, batch: int, rounds: int, seconds: float) -> tuple[Rates, Rates]:
    """Samples/s of each variant and those per second of CPU time, one a round, each over about so many seconds; the
    first round is dropped."""
    order = torch.randperm(ROWS)
    variants: dict[str, Callable[[], Iterator[Any]]] = {
        "limit": lambda: limit(data, batch, order),
        "naive": lambda: naive(data, batch),
        **{f"ours, {name}": lambda plan=plan: ours(data, batch, plan) for name, plan in OURS.items()},
    }
    by_wall: Rates = {name: [] for name in variants}
    by_cpu: Rates = {name: [] for name in variants}
    num = dict.fromkeys(variants, 3)
    for number in range(rounds + 1):
        for name in turned(variants, number):
            wall, cpu = rates(variants[name](), batch, num[name])
            num[name] = max(3, min(round(seconds * wall / batch), ROWS // batch - 2))
            if number:
                by_wall[name].append(wall)
                by_cpu[name].append(cpu)
    return by_wall, by_cpu


def measure_busy(data: Triplets, batch: int, rounds: int, num: int) -> dict[str, list[float]]:
    """Busy share of each variant, one a round."""
    held = list(itertools.islice(ours(data, batch, OURS["inline"]), num + 1))
    variants: dict[str, Callable[[], Iterator[Any]]] = {
        "naive": lambda: naive(data, batch),
        "batches at hand": lambda: iter(held),
        **{f"ours, {name}": lambda plan=plan: ours(data, batch, plan) for name, plan in OURS.items()},
    }
    raw: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds):
        for name in turned(variants, number):
            raw[name].append(busy(variants[name](), 10 if name == "naive" else num))
    return raw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.4, help="of one variant in one round")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    data = Triplets()
    results: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for batch in BATCHES:
        found, by_cpu = measure(data, batch, chosen.rounds, chosen.seconds)
        fastest = [max(each) for each in zip(*(found[f"ours, {name}"] for name in OURS), strict=True)]
        peers = {"a bare gather of the columns": found["limit"], "DataLoader over samples": found["naive"]}
        rows += compared(f"triplets in batches of {batch:,}", "samples/s", fastest, peers)
        for name, each_s in found.items():
            result = {
                "variant": name,
                "batch": batch,
                "n": len(each_s),
                "samples_per_s_mean": statistics.fmean(each_s),
                "samples_per_s_sd": statistics.stdev(each_s),
                "us_per_batch_median": 1e6 * batch / statistics.median(each_s),
            }
            for other in ("limit", "naive") if name.startswith("ours") else ():
                of_one = ratios(found, name, other)
                result[f"ratio_to_{other}_median"] = statistics.median(of_one)
                result[f"ratio_to_{other}_ci95"] = interval(of_one)
                result[f"cpu_ratio_to_{other}_median"] = statistics.median(ratios(by_cpu, name, other))
                result[f"cpu_ratio_to_{other}_ci95"] = interval(ratios(by_cpu, name, other))
            results.append(result)
            print({key: round(value, 3) if isinstance(value, float) else value for key, value in result.items()})
    found = measure_busy(data, 2048, chosen.rounds, 400)
    busiest = [100 * max(each) for each in zip(*(found[f"ours, {name}"] for name in OURS), strict=True)]
    peers = {"DataLoader over samples": [100 * share for share in found["naive"]]}
    rows += compared("a device with steps of 1 ms computes", "% of the time", busiest, peers)
    for name, shares in found.items():
        results.append(
            {
                "variant": name,
                "batch": 2048,
                "n": len(shares),
                "busy_frac_median": statistics.median(shares),
                "busy_frac_ci95": interval(shares),
            }
        )
        print(results[-1])

    def best(batch: int, key: str) -> float:
        return max(each[key] for each in results if each["batch"] == batch and key in each)

    share = max(each["busy_frac_median"] for each in results if each.get("variant", "").startswith("ours, ")
                and "busy_frac_median" in each)  # fmt: skip
    says = "; ".join(
        f"batch {batch}: {best(batch, 'ratio_to_limit_median'):.2f} of the limit, "
        f"{best(batch, 'ratio_to_naive_median'):.0f} times the naive loader"
        for batch in BATCHES
    )
    config = {
        "rows": ROWS,
        "step_ms": 1000 * STEP_S,
        "threads": 1,
        "ours": {name: vars(plan) for name, plan in OURS.items()},
    }
    says += f". A device with steps of 1 ms is busy {100 * share:.1f} % of the time."
    finish("loader", results, says, chosen.out, config=config, compared=rows)


if __name__ == "__main__":
    main()
