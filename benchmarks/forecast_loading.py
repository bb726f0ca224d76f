"""Windows of series: one at a time as such code usually begins, our fetch, and our loader.

    python benchmarks/forecast_loading.py [--rounds 7] [--out RECORD]

The embedded series, windows of 90 days and the week after each. A step wants history and target as float32.

- per sample: a Dataset that cuts one window and its calendar out of arrays, torch's default collate, DataLoader without
  workers and with two; a ratio is to the faster of them.
- pytorch-forecasting: the same table as a `TimeSeriesDataSet`, by its `to_dataloader`, if it is installed.
- fetch: `Windows.fetch` alone, for each `memory.features`; in `cache` it gives places and copies no window.
- with on_device: our loader and `on_device` on this CPU, which a GPU would do: all that a step gets.

Every round times all of them once, in turns, so that a noisy machine disturbs all alike; a ratio is of one round. One
torch thread.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.loader import rate  # noqa: E402
from benchmarks.measuring import compared, finish, has, interval, ratios, turned  # noqa: E402
from wellfed.contract import FEATURE_MODES  # noqa: E402
from wellfed.data.settings import LoaderSettings  # noqa: E402
from wellfed.data.train_loader import train_loader  # noqa: E402
from wellfed.sample_rng import SampleRng  # noqa: E402
from wellfed.train.memory.features import hold  # noqa: E402
from workloads.forecast.data import datasets  # noqa: E402

WINDOW, HORIZON = 90, 7
BATCHES = (128, 512)
WORKERS = {"per sample, no workers": 0, "per sample, 2 workers": 2}
PEER = "pytorch-forecasting"


class OneWindow(Dataset[tuple[Tensor, Tensor]]):
    """History and target of one origin, cut and converted for itself."""

    def __init__(self, table_NC: np.ndarray) -> None:
        self.table_NC = table_NC

    def __len__(self) -> int:
        return len(self.table_NC) - WINDOW - HORIZON

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        history = self.table_NC[index : index + WINDOW]
        target = self.table_NC[index + WINDOW : index + WINDOW + HORIZON, 0]
        return torch.tensor(history, dtype=torch.float32), torch.tensor(target, dtype=torch.float32)


def fetched(data: Any, batch: int) -> Iterator[Any]:
    for number, indices in enumerate(torch.randperm(len(data)).split(batch)):
        yield data.fetch(indices, SampleRng(0, 0, number))


def prepared(data: Any, batch: int, source: Any) -> Iterator[Any]:
    with closing(train_loader(data, batch_size=batch, seed=0, settings=LoaderSettings())) as loader:
        for number, delivery in enumerate(loader):
            yield data.on_device(delivery.batch, SampleRng(0, 0, number), source)


def of_pytorch_forecasting(table_NC: np.ndarray, batch: int) -> Iterator[Any]:
    import pandas as pd
    from pytorch_forecasting import TimeSeriesDataSet

    names = [f"value_{column}" for column in range(table_NC.shape[1])]
    table = pd.DataFrame(table_NC.astype(np.float32), columns=names).assign(time=range(len(table_NC)), series="0")
    data = TimeSeriesDataSet(
        table,
        time_idx="time",
        target=names[0],
        group_ids=["series"],
        min_encoder_length=WINDOW,
        max_encoder_length=WINDOW,
        min_prediction_length=HORIZON,
        max_prediction_length=HORIZON,
        time_varying_unknown_reals=names,
    )
    return iter(data.to_dataloader(train=True, batch_size=batch, num_workers=0))


def variants(batch: int) -> dict[str, Callable[[], Iterator[Any]]]:
    """Returns the timed variants by name."""
    made = datasets(windows=(WINDOW,), horizon=HORIZON)
    assert made.features is not None
    assert made.features.store is not None
    plain = OneWindow(made.features.store().numpy().astype(np.float64))
    of_mode = {mode: made.train.for_features(mode) for mode in FEATURE_MODES}
    held = {mode: hold(made.features, mode, torch.device("cpu")) for mode in FEATURE_MODES}

    def per_sample(workers: int) -> Iterator[Any]:
        return iter(DataLoader(plain, batch_size=batch, shuffle=True, num_workers=workers))

    return {
        **{name: lambda n=n: per_sample(n) for name, n in WORKERS.items()},
        **({PEER: lambda: of_pytorch_forecasting(plain.table_NC, batch)} if has("pytorch_forecasting") else {}),
        **{f"fetch, {mode}": lambda each=each: fetched(each, batch) for mode, each in of_mode.items()},
        **{f"with on_device, {mode}": lambda m=mode: prepared(of_mode[m], batch, held[m]) for mode in FEATURE_MODES},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    results: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for batch in BATCHES:
        timed = variants(batch)
        found: dict[str, list[float]] = {name: [] for name in timed}
        for number in range(chosen.rounds + 1):  # the first round is dropped
            for name in turned(timed, number):
                windows_per_s = rate(timed[name](), batch, 4 if name == PEER else 20)
                if number:
                    found[name].append(windows_per_s)
        best = [max(pair) for pair in zip(*(found[name] for name in WORKERS), strict=True)]
        whole = [max(each) for each in zip(*(found[f"with on_device, {mode}"] for mode in FEATURE_MODES), strict=True)]
        peers = {PEER: found.get(PEER), "DataLoader over windows": best}
        rows += compared(f"forecast windows in batches of {batch}", "windows/s", whole, peers)
        for name, rates in found.items():
            of_one = ratios({"mine": rates, "best": best}, "mine", "best")
            median, ci95 = statistics.median(of_one), interval(of_one)
            results.append(
                {
                    "variant": name,
                    "batch": batch,
                    "n": len(rates),
                    "windows_per_s_mean": statistics.fmean(rates),
                    "windows_per_s_sd": statistics.stdev(rates),
                    "ratio_to_per_sample_median": median,
                    "ratio_to_per_sample_ci95": ci95,
                }
            )
            mean = statistics.fmean(rates)
            print(f"batch {batch}: {name:<26} {mean:>12,.0f} windows/s, {median:.1f} ({ci95[0]:.1f} to {ci95[1]:.1f})")
    says = "; ".join(
        f"batch {each['batch']}: {each['variant']} {each['ratio_to_per_sample_median']:.1f}"
        for each in results
        if each["variant"].startswith("with")
    )
    says = f"Windows a second in multiples of the per-sample pipeline: {says}."
    config = {"window": WINDOW, "horizon": HORIZON, "batches": BATCHES, "threads": 1}
    finish("forecast_loading", results, says, chosen.out, config=config, compared=rows)


if __name__ == "__main__":
    main()
