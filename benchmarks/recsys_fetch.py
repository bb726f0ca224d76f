"""Time to fetch a batch of 2048 triplets on one thread, with listed and with searched negatives.

python benchmarks/recsys_fetch.py
"""

from __future__ import annotations

import statistics
import time

import torch

from wellfed.sample_rng import SampleRng
from workloads.recsys.interactions import leave_last_out
from workloads.recsys.synthetic import synthetic_interactions
from workloads.recsys.triplets import TABLE_CELLS, TripletData

BATCH, REPEATS = 2048, 500


def main() -> None:
    torch.set_num_threads(1)
    for scale in (0.1, 1.0):
        made = synthetic_interactions(scale, 0)
        split = leave_last_out(made, None)
        for kind, cells in (("listed", TABLE_CELLS), ("searched", 0)):
            sizes = {"num_users": len(made.user_texts), "num_items": len(made.item_texts)}
            data = TripletData(split.users, split.items, **sizes, table_cells=cells)  # type: ignore[arg-type]
            times_ms = []
            for batch in range(REPEATS):
                indices = torch.randint(len(data), (BATCH,))
                began_at_s = time.perf_counter()
                data.fetch(indices, SampleRng(0, 0, batch))
                times_ms.append(1000 * (time.perf_counter() - began_at_s))
            low, middle, high = (statistics.quantiles(times_ms, n=20)[at] for at in (0, 9, 18))
            print(f"scale {scale}: {kind} negatives: median {middle:.3f} ms, 5-95 % {low:.3f}-{high:.3f} ms a batch")


if __name__ == "__main__":
    main()
