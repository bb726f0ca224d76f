"""How long does it take N ranks to agree on a flag? Gloo's all-reduce, and log2(N) exchanges by hand, in turns.

    python benchmarks/agreements.py [--ranks 2,4,8,16] [--rounds 7] [--out RECORD]

Each step of several ranks has such agreements (memory.on_oom=retry): whether memory ran out on one of them in the
passes, and in the optimizer's step. Gloo hands a flag around all ranks twice; a flag that spreads to twice as many with
each exchange needs fewer messages one after the other, and each is a call from Python. Ranks are processes of one
machine that talk by Gloo over its loopback; more of them than cores take turns, which costs both ways alike. How many
sockets a rank has open is counted too: Gloo connects each of a group to each other one.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from benchmarks.forked_ranks import on_ranks  # noqa: E402
from benchmarks.measuring import finish  # noqa: E402
from wellfed.train.step.replicas import AgreeingReplicas  # noqa: E402

TIMES = 100
"""Agreements of a round and way."""


class Agreeing(AgreeingReplicas):
    """Ranks that do nothing but agree, by Gloo as in training, or by hand."""

    def __init__(self, group: Any) -> None:
        self._group, self.size, self.number = group, dist.get_world_size(), dist.get_rank()
        self._no_gradient = []

    def by_hand(self, is_so: bool) -> bool:
        """In log2(N) exchanges, each with a rank twice as far away as the one before."""
        known, heard = torch.tensor([is_so], dtype=torch.uint8), torch.empty(1, dtype=torch.uint8)
        distance = 1
        while distance < self.size:
            hearing = dist.irecv(heard, (self.number - distance) % self.size, group=self._group)
            dist.send(known, (self.number + distance) % self.size, group=self._group)
            assert hearing is not None  # of a rank that is no member of the group
            hearing.wait()
            known = torch.maximum(known, heard)
            distance *= 2
        return bool(known)


def sockets() -> int:
    """That this process has open."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket")
        except OSError:
            continue
    return found


def agreed(rank: int, size: int, rounds: int) -> dict[str, Any]:
    """On one rank microseconds of an agreement, by way and round, and its sockets in a group."""
    before = sockets()
    ranks = Agreeing(dist.new_group(backend="gloo"))
    taken: dict[str, list[float]] = {"gloo": [], "by_hand": []}
    of_the_group = sockets() - before
    for number in range(rounds + 1):
        ways = [("gloo", ranks.any), ("by_hand", ranks.by_hand)]
        for name, agree in ways if number % 2 else reversed(ways):
            dist.barrier()
            began_s = time.perf_counter()
            for turn in range(TIMES):
                assert agree(turn % size == rank)
            if number:
                taken[name].append(1e6 * (time.perf_counter() - began_s) / TIMES)
    return {"us": taken, "sockets": of_the_group}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", default="2,4,8,16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="file of the record")
    asked = parser.parse_args()
    results = []
    for size in map(int, asked.ranks.split(",")):
        found = on_ranks(functools.partial(agreed, rounds=asked.rounds), size)
        ratios = [hand / gloo for gloo, hand in zip(found["us"]["gloo"], found["us"]["by_hand"], strict=True)]
        row = {"ranks": size, "n": len(ratios), "sockets_of_a_rank": found["sockets"]}
        for name, values in found["us"].items():
            row |= {f"{name}_us_mean": statistics.fmean(values), f"{name}_us_sd": statistics.stdev(values)}
        row["by_hand_to_gloo_median"] = statistics.median(ratios)
        results.append(row)
        print({key: round(value, 2) for key, value in row.items()}, flush=True)
    says = "; ".join(f"{row['ranks']} ranks: {row['by_hand_to_gloo_median']:.1f}" for row in results)
    says = f"By hand a flag takes so many times as long as by Gloo's all-reduce: {says}."
    finish("agreements", results, says, asked.out, config={"times": TIMES, "backend": "gloo, loopback"})


if __name__ == "__main__":
    main()
