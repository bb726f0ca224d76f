from pathlib import Path

import numpy as np
import pytest
import torch

from wellfed import ConfigError, DataError, SampleRng, TrainData
from workloads.forecast.data import build, datasets
from workloads.forecast.series import SeriesSet
from workloads.forecast.steps import Frequency

DAILY = Frequency("time", 86_400_000_000, np.datetime64("2024-01-01", "us"))


def test_the_embedded_set_is_split_and_described():
    made = datasets(num_series=3, num_days=300, horizon=7, windows=[28, 14])
    assert isinstance(made.train, TrainData)
    assert made.model_args == {"horizon": 7, "num_channels": 6, "season": 7, "num_series": 3}
    assert made.notes == (
        f"3 series, 900 steps of 1 day from 2019-01-01 to 2019-10-27, {len(made.train):,} training windows",
    )
    assert len(made.val) == len(made.test) == 3 * 4 * 2  # series, origins in 28 days, windows
    assert made.features.bytes == (28 + 900) * 6 * 4
    other = datasets(num_series=3, num_days=300, horizon=7, windows=[28, 14], seed=1)
    assert not torch.equal(other.features.store(), made.features.store())


def test_a_file_is_read_split_and_scored(tmp_path: Path):
    rng = np.random.default_rng(0)
    file = tmp_path / "sales.csv"
    days = np.datetime64("2024-01-01") + np.arange(200).astype("m8[D]")
    table = {name: 50 + 20 * np.sin(np.arange(200) * 2 * np.pi / 7) + rng.normal(size=200) for name in ("a", "b")}
    rows = [f"{day};{a:.2f};{b:.2f}" for day, a, b in zip(days, *table.values(), strict=True) if str(day)[8:] != "13"]
    file.write_text("\n".join(["Datum;a;b", *rows]).replace(".", ","), encoding="utf-8-sig")
    made = datasets(str(file), date_column="datum", target=["a", "b"], windows=[14], horizon=7, fill="linear")
    assert made.notes[1:] == (
        "sales.csv: dates of 'Datum', values of 'a', 'b'",
        "14 of 400 steps missing, in 2 of 2 series, the first: a, 2024-01-13; filled (workload.data.fill=linear)",
    )
    evaluation = made.evaluation
    batch = made.test.on_device(made.test.fetch(torch.arange(len(made.test))), SampleRng(0, 0))
    perfect = Perfect()
    evaluation.reset()
    evaluation.update(perfect, batch)
    found = evaluation.compute()
    assert found["mae"] == 0
    assert 0.5 < found["mase_seasonal_naive"] < 1.5
    assert 0.5 < found["mae_seasonal_naive"] < 2


class Perfect(torch.nn.Module):
    def forward(self, batch):
        return batch["target"]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"horizon": 0, "windows": [], "fill": "mean"}, ["horizon", "windows", "fill"]),
        ({"windows": [30, "60"], "passes": 0}, ["windows", "passes"]),
        ({"date_column": "d", "target": "t", "series_column": "s"}, ["date_column", "target", "series_column"]),
    ],
)
def test_all_faults_of_the_arguments_are_named_at_once(arguments: dict, names: list[str]):
    with pytest.raises(ConfigError) as caught:
        datasets(**arguments)
    told = [fault.where.removeprefix("workload.data.") for fault in caught.value.faults]
    assert set(names) <= set(told)
    assert all(fault.way_out for fault in caught.value.faults)


def of(*values: np.ndarray, frequency: Frequency = DAILY) -> SeriesSet:
    return SeriesSet([f"s{n}" for n in range(len(values))], list(values), [0] * len(values), frequency)


def test_scaling_knows_the_train_part_alone():
    values = np.concatenate([np.arange(80.0), np.full(20, 1e6)])
    made = build(of(values), horizon=5, windows=(10,))
    evaluation = made.evaluation
    assert float(evaluation.center_S[0]) == np.arange(80).mean()
    assert float(evaluation.scale_S[0]) == pytest.approx(np.arange(80).std())
    assert float(evaluation.naive_mae_S[0]) == 7  # a week further up the slope


def test_a_series_that_never_changes_is_not_divided_by_zero():
    made = build(of(np.full(100, 3.3), np.arange(100.0)), horizon=5, windows=(10,))
    batch = made.train.on_device(made.train.fetch(torch.arange(len(made.train))), SampleRng(0, 0))
    assert all(values.isfinite().all() for values in batch.values() if values.is_floating_point())
    assert float(made.evaluation.scale_S[0]) == 1
    assert float(made.evaluation.naive_mae_S[0]) == 0


def test_a_file_that_is_too_short_is_named(tmp_path: Path):
    file = tmp_path / "short.csv"
    file.write_text("date,v\n" + "".join(f"2024-01-{day:02},{day}\n" for day in range(1, 31)))
    with pytest.raises(
        DataError, match=r"short\.csv: no series is long enough. The longest, 'v', has 30 steps of 1 day"
    ):
        datasets(str(file), windows=[30, 60, 90])
    assert len(datasets(str(file), windows=[7], horizon=2, passes=1).train) == 30 - 8 - 7 - 1


HOURLY = Frequency("time", 3_600_000_000, DAILY.first)
MONTHS = {every: Frequency("months", every, DAILY.first) for every in (1, 3, 12)}


@pytest.mark.parametrize(
    ("frequency", "steps", "horizon", "windows"),
    [
        (DAILY, 1500, 7, [30, 60, 90]),
        (DAILY, 100, 7, [30, 60]),
        (Frequency("business", 1, DAILY.first), 500, 5, [20, 40, 60]),
        (HOURLY, 4000, 24, [48, 168]),
        (Frequency("time", 7 * 86_400_000_000, DAILY.first), 600, 13, [52, 104]),
        (MONTHS[1], 144, 12, [24, 36, 60]),
    ],
)
def test_horizon_and_windows_follow_from_frequency_and_length(frequency, steps: int, horizon: int, windows: list[int]):
    made = build(of(np.sin(np.arange(float(steps))), frequency=frequency))
    found = {knob.rpartition(".")[2]: value for knob, (value, _) in made.derived.items()}
    assert (found["horizon"], found["windows"]) == (horizon, windows)
    assert made.model_args["horizon"] == horizon
    assert all(reason for _, reason in made.derived.values())
    assert len(made.test)
    assert len(made.val)


def test_a_short_set_is_passed_often_in_an_epoch():
    made = build(of(np.arange(100.0)), horizon=5, windows=(10,))
    passes, reason = made.derived["workload.data.passes"]
    num = len(made.train) // passes
    assert num == 66
    assert reason == "66 training windows; an epoch has 4,096 or more"
    assert passes == 63
    indices = torch.tensor([3, num + 3, 62 * num + 3])
    batch = made.train.fetch(indices)
    assert all((values == values[0]).all() for values in batch.values())
    typed = build(of(np.arange(100.0)), horizon=5, windows=(10,), passes=2)
    assert not typed.derived
    assert len(typed.train) == 2 * num
