"""CPU time of a batch that comes from a worker process: ours and torch's DataLoader.

    python benchmarks/handover.py [--rounds 7] [--out RECORD]

A batch has three columns of float32. Triplets are 2,048 rows of one value, fetched at once. Images are 16 rows of
32,768 values, fetched at once or read sample by sample and collated by torch's `default_collate`. There is one worker.

Handover is the CPU time of this process and of the worker, less the time to build the batch in this process. Beside it
stands the CPU time of this process alone, which is what a step can lose; sending requests is in it. Other processes
disturb CPU time less than the clock. Every round times all variants, in turns; a ratio is of one round. One
torch thread.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor
from torch.utils.data import DataLoader

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.measuring import compared, finish, interval, ratios, turned  # noqa: E402
from wellfed.data.settings import LoaderSettings  # noqa: E402
from wellfed.data.train_loader import train_loader  # noqa: E402


class Kind(NamedTuple):
    """A kind of batch."""

    batch: int
    """Rows of a batch."""
    width: int
    """Values of a row in each column."""
    rows: int
    """Rows of the data."""
    num_timed: int
    """Batches of one measurement."""
    by_item: bool = False


KINDS = {
    "triplets": Kind(2048, 1, 2**20, 600),
    "images": Kind(16, 2**15, 640, 60),
    "images by sample": Kind(16, 2**15, 640, 60, by_item=True),
}
PLAN = LoaderSettings("processes", 1, prefetch_factor=8, persistent_workers=True)


class Columns:
    """Three columns, read by sample."""

    def __init__(self, kind: Kind) -> None:
        self.kind, self.columns = kind, [torch.ones(kind.rows, kind.width) for _ in range(3)]

    def __len__(self) -> int:
        return self.kind.rows

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(column[index] for column in self.columns)


class FetchedColumns(Columns):
    """The same, fetched by batch."""

    def fetch(self, indices: Tensor, rng: Any) -> tuple[Tensor, ...]:
        return tuple(column.index_select(0, indices) for column in self.columns)


class Batches:
    """A sample of DataLoader is a batch."""

    def __init__(self, data: FetchedColumns) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data) // self.data.kind.batch

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        batch = self.data.kind.batch
        return self.data.fetch(torch.arange(index * batch, (index + 1) * batch), None)


def torch_loader(data: Columns) -> DataLoader[Any]:
    read: Any = Batches(data) if isinstance(data, FetchedColumns) else data
    batch = None if isinstance(data, FetchedColumns) else data.kind.batch
    return DataLoader(read, batch, shuffle=True, num_workers=1, prefetch_factor=8, persistent_workers=True)


def cpu_ms(data: Columns, settings: LoaderSettings | None) -> tuple[float, float]:
    """CPU milliseconds a batch of this process and its worker, and of this process; None = torch's DataLoader."""
    kind, loader = data.kind, None
    if settings is not None:
        loader = train_loader(data, batch_size=kind.batch, seed=0, settings=settings)
    before = {child.pid for child in psutil.Process().children()}
    batches = itertools.chain.from_iterable(itertools.repeat(loader or torch_loader(data)))
    for _ in itertools.islice(batches, 20):
        pass
    workers = [child for child in psutil.Process().children() if child.pid not in before]
    assert len(workers) == (settings is None or settings.num_workers)

    def workers_s() -> float:
        return sum(sum(worker.cpu_times()[:2]) for worker in workers)

    began_s, workers_began_s = time.process_time(), workers_s()
    for _ in itertools.islice(batches, kind.num_timed):
        pass
    here_s, there_s = time.process_time() - began_s, workers_s() - workers_began_s
    if loader is not None:
        loader.close()
    return 1000 * (here_s + there_s) / kind.num_timed, 1000 * here_s / kind.num_timed


def measure(kind: Kind, rounds: int) -> dict[str, list[float]]:
    """CPU milliseconds of each handover, and of this process in it, one a round; the first round is dropped."""
    data = Columns(kind) if kind.by_item else FetchedColumns(kind)
    plans = {"ours": PLAN, "torch": None}
    raw: dict[str, list[float]] = {name: [] for each in plans for name in (each, f"{each} here")}
    for number in range(rounds + 1):
        in_place, _ = cpu_ms(data, LoaderSettings())
        for name in turned(plans, number):
            both, here = cpu_ms(data, plans[name])
            if number:
                raw[name].append(both - in_place)
                raw[f"{name} here"].append(here)
    return raw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    results: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for name, kind in KINDS.items():
        raw = measure(kind, chosen.rounds)
        least = {which: [max(value, 0.001) for value in values] for which, values in raw.items()}
        peers = {"torch's DataLoader": least["torch"]}
        what = f"handing over a batch of {name} from a worker"
        rows += compared(what, "ms of CPU time", least["ours"], peers, less_is_better=True)
        of_one = ratios(raw, "torch", "ours")
        results.append(
            {
                "batch": name,
                "n": len(of_one),
                "handover_cpu_ms_median": statistics.median(raw["ours"]),
                "handover_cpu_ms_ci95": interval(raw["ours"]),
                "training_process_cpu_ms_median": statistics.median(raw["ours here"]),
                "training_process_cpu_ms_ci95": interval(raw["ours here"]),
                "torch_cpu_ms_median": statistics.median(raw["torch"]),
                "torch_cpu_ms_ci95": interval(raw["torch"]),
                "torch_training_process_cpu_ms_median": statistics.median(raw["torch here"]),
                "times_less_median": statistics.median(of_one),
                "times_less_ci95": interval(of_one),
            }
        )
        print(results[-1], flush=True)
    says = "; ".join(
        f"{each['batch']}: {each['handover_cpu_ms_median']:.2f} ms ("
        f"{each['training_process_cpu_ms_median']:.2f} ms in the training process), torch's DataLoader "
        f"{each['torch_cpu_ms_median']:.2f} ms, {each['times_less_median']:.1f} times "
        f"({each['times_less_ci95'][0]:.1f} to {each['times_less_ci95'][1]:.1f})"
        for each in results
    )
    config = {"kinds": {name: kind._asdict() for name, kind in KINDS.items()}, "plan": vars(PLAN), "threads": 1}
    says = f"CPU time of handing over a batch. {says}."
    finish("handover", results, says, chosen.out, config=config, compared=rows)


if __name__ == "__main__":
    main()
