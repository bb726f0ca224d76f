import csv
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from workloads.forecast.evaluation import Forecasts

SCALE, CENTER = torch.tensor([2.0, 10.0]), torch.tensor([5.0, -3.0])
NAIVE_MAE = torch.tensor([1.5, 0.5])
SEASON, HORIZON, LONGEST = 3, 4, 6


class Guess(nn.Module):
    """A forecast of the batch by some rule, [B, H]."""

    def __init__(self, rule: Callable[[dict[str, Tensor]], Tensor]) -> None:
        super().__init__()
        self.rule = rule

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.rule(batch)


def one_more_each_window(batch: dict[str, Tensor]) -> Tensor:
    """Off by 0.1 x window."""
    return batch["target"] + 0.1 * batch["window"][:, None]


def split_of(num_origins: int = 5, windows: tuple[int, ...] = (3, 6), split: int = 1) -> dict[str, Tensor]:
    """All samples of a split of two series: each origin with each window, some targets missing."""
    draw = torch.Generator().manual_seed(0)
    origins = 2 * num_origins
    history = torch.randn(origins, LONGEST, 4, generator=draw)
    history[..., -1] = 1.0
    target = torch.randn(origins, HORIZON, generator=draw)
    observed = (torch.rand(origins, HORIZON, generator=draw) < 0.8).float()
    series = torch.arange(2).repeat_interleave(num_origins)
    parts = []
    for window in windows:
        masked = history.clone()
        masked[:, : LONGEST - window] = 0
        row = torch.arange(origins) * HORIZON + 100 * series
        parts.append(
            {"history": masked, "target": target, "target_observed": observed, "series": series, "row": row}
            | {"window": torch.full_like(series, window), "split": torch.full_like(series, split)}
        )
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def scored(model: nn.Module, samples: dict[str, Tensor], size: int = 4, order: Tensor | None = None) -> Forecasts:
    evaluation = Forecasts(SCALE, CENTER, NAIVE_MAE, SEASON, HORIZON, ["one", "two"])
    count = len(samples["row"])
    for rows in (torch.arange(count) if order is None else order).split(size):
        evaluation.update(model, {name: values[rows] for name, values in samples.items()})
    return evaluation


def test_figures_agree_with_arithmetic():
    """The mean over the windows 3 and 6 is 0.45 too high, in units of each series' scale."""
    samples = split_of()
    metrics = scored(Guess(one_more_each_window), samples).compute()
    seen = samples["target_observed"][:10] > 0
    errors = 0.45 * SCALE[:, None].expand(2, 5).reshape(10, 1) * torch.ones(10, HORIZON)
    assert metrics["mae"] == pytest.approx(errors[seen].mean().item())
    assert metrics["rmse"] == pytest.approx(errors[seen].square().mean().sqrt().item())
    assert metrics["mase"] == pytest.approx((0.45 * 2.0 / 1.5 + 0.45 * 10.0 / 0.5) / 2)
    naive = samples["history"][10:, [3, 4, 5, 3], 0]  # of the longest window
    difference = (naive - samples["target"][:10]).abs() * SCALE[:, None].expand(2, 5).reshape(10, 1)
    by_series = [difference[part][seen[part]].mean().item() for part in (slice(0, 5), slice(5, 10))]
    assert metrics["mae_seasonal_naive"] == pytest.approx(difference[seen].mean().item())
    assert metrics["mase_seasonal_naive"] == pytest.approx((by_series[0] / 1.5 + by_series[1] / 0.5) / 2)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_that_share_the_batches_have_the_figures_of_one(num_ranks: int):
    samples, model = split_of(), Guess(one_more_each_window)
    expected = scored(model, samples).compute()
    ranks = [Forecasts(SCALE, CENTER, NAIVE_MAE, SEASON, HORIZON, ["one", "two"]) for _ in range(num_ranks)]
    for number, rows in enumerate(torch.arange(20).split(4)):
        ranks[number % num_ranks].update(model, {name: values[rows] for name, values in samples.items()})
    states = [rank.state() for rank in ranks]
    for rank in ranks:
        rank.merge(states)
        assert rank.compute() == expected


def test_a_perfect_forecast_has_no_error_and_reset_forgets_all():
    evaluation = scored(Guess(lambda batch: batch["target"]), split_of())
    assert evaluation.compute()["mase"] == pytest.approx(0, abs=1e-12)
    evaluation.reset()
    assert all(math.isnan(value) for value in evaluation.compute().values())


@pytest.mark.parametrize(("split", "name"), [(0, "val"), (1, "test")])
def test_tables_have_a_row_for_each_step_and_for_each_series(tmp_path: Path, split: int, name: str):
    samples = split_of(split=split)
    evaluation = scored(Guess(one_more_each_window), samples)
    paths = evaluation.artifacts(tmp_path)
    assert set(paths) == {f"forecasts_{name}", f"series_{name}"}
    with paths[f"forecasts_{name}"].open() as file:
        steps = list(csv.DictReader(file))
    assert len(steps) == int(samples["target_observed"][:10].sum())
    errors = [abs(float(row["forecast"]) - float(row["target"])) for row in steps]
    assert np.mean(errors) == pytest.approx(evaluation.compute()["mae"])
    assert int(steps[0]["row"]) == LONGEST + int(steps[0]["step"]) - 1
    with paths[f"series_{name}"].open() as file:
        table = list(csv.DictReader(file))
    assert [(row["series"], row["origins"]) for row in table] == [("one", "5"), ("two", "5")]
    assert np.mean([float(row["mase"]) for row in table]) == pytest.approx(evaluation.compute()["mase"])
