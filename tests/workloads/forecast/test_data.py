from pathlib import Path

import numpy as np
import pytest
import torch

from wellfed import ConfigError, DataError, SampleRng, TrainData
from workloads.forecast.data import build, datasets
from workloads.forecast.series import SeriesSet
from workloads.forecast.steps import Frequency
from workloads.forecast.store import naive_mae

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


def test_the_embedded_set_is_asked_what_it_was_made_for():
    derived = datasets(num_series=2, num_days=1500).derived
    assert {knob.rpartition(".")[2]: value for knob, (value, _) in derived.items()} == {
        "horizon": 7,
        "windows": [30, 60, 90],
    }


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
        ({"windows": "30"}, ["windows"]),
        ({"windows": 30}, ["windows"]),
        ({"horizon": 1.5, "val_frac": 1, "test_frac": -0.1}, ["horizon", "val_frac", "test_frac"]),
        ({"val_frac": 0.5, "test_frac": 0.5}, ["val_frac"]),
        ({"max_bad_rows": -1, "num_series": 0, "num_days": 0, "seed": -1}, ["max_bad_rows", "num_series", "num_days"]),
        ({"date_column": "d", "target": "t", "series_column": "s"}, ["date_column", "target", "series_column"]),
        ({"frequency": "fortnight", "decimal": ";", "day_first": True}, ["frequency", "decimal", "day_first"]),
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


def test_in_sample_error_of_the_seasonal_naive_forecast():
    assert naive_mae(np.array([1.0, 2.0, 4.0, np.nan, 5.0]), 2) == 2  # 4 - 1 and 5 - 4
    assert np.isnan(naive_mae(np.array([1.0, 2.0]), 2))
    assert np.isnan(naive_mae(np.array([1.0, np.nan, np.nan]), 1))


def test_filled_steps_change_no_divisor_of_mase():
    values = np.arange(100.0) ** 2
    values[30:40] = np.nan
    divisors = [
        float(build(of(values), horizon=5, windows=(10,), fill=fill).evaluation.naive_mae_S[0])
        for fill in ("none", "forward", "linear", "zero")
    ]
    assert divisors == [naive_mae(values[:80], 7)] * 4


def test_windows_without_anything_to_learn_from_are_left_out():
    values = np.arange(120.0)
    values[30:50] = np.nan
    whole, gappy = (build(of(each), horizon=5, windows=(10, 20), passes=1).train for each in (np.arange(120.0), values))
    # 16 origins have no value among their 5 targets, 11 others none in the 10 steps before them, 6 neither
    assert (len(whole) - len(gappy)) // 2 == len({*range(30, 46), *range(40, 51)})
    batch = gappy.on_device(gappy.fetch(torch.arange(len(gappy))), SampleRng(0, 0))
    assert batch["target_observed"].sum(1).min() > 0
    assert batch["history"][..., -1].sum(1).min() > 0
    holes = np.full(60, np.nan)
    holes[[0, 30, 59]] = 1
    with pytest.raises(DataError, match=r"no window to train on.*workload\.data\.fill=forward"):
        build(of(holes), horizon=1, windows=(1,))


def test_a_validation_part_without_a_value_is_told():
    values = np.arange(100.0)
    values[80:90] = np.nan
    made = build(of(values), horizon=5, windows=(10,))
    assert made.val is None
    assert "the val part has no value, so there is no val" in made.notes


@pytest.mark.parametrize(("val_frac", "test_frac"), [(0, 0.1), (0.1, 0), (0, 0)])
def test_a_part_of_no_share_is_no_split(val_frac: float, test_frac: float):
    made = build(of(np.arange(100.0)), horizon=5, windows=(10,), val_frac=val_frac, test_frac=test_frac)
    assert ((made.val is None), (made.test is None)) == (val_frac == 0, test_frac == 0)


def test_what_a_season_needs_is_told():
    short = build(of(np.arange(40.0)), horizon=2, windows=(5,))
    assert short.model_args["season"] == 7
    assert short.notes[-1].startswith("the longest window (5) holds no season (7 steps): where seasonal naive finds no")
    assert short.notes[-1].endswith("; workload.data.windows=[7] would hold it")
    yearly = Frequency("time", 7 * 86_400_000_000, DAILY.first)
    none = build(of(np.arange(60.0), frequency=yearly), horizon=2, windows=(5,))
    assert none.model_args["season"] == 1
    assert none.notes[-1].startswith("no train part holds two seasons of 52 steps")


def test_series_that_mase_leaves_out_are_told():
    plain = SeriesSet(["a", "b"], [np.arange(60.0), np.arange(60.0) % 7], [0, 0], DAILY)
    made = build(plain, horizon=2, windows=(14,))
    assert made.notes[-1].startswith("MASE leaves out 1 of 2 series")
    assert made.notes[-1].endswith("the first: b")


def test_a_file_that_is_too_short_is_named(tmp_path: Path):
    file = tmp_path / "short.csv"
    file.write_text("date,v\n" + "".join(f"2024-01-{day:02},{day}\n" for day in range(1, 31)))
    with pytest.raises(
        DataError, match=r"short\.csv: no series is long enough. The longest, 'v', has 30 steps of 1 day"
    ):
        datasets(str(file), windows=[30, 60, 90])
    assert len(datasets(str(file), windows=[7], horizon=2, passes=1).train) == 30 - 8 - 7 - 1


def test_large_numbers_keep_their_differences():
    values = 1e9 + np.sin(np.arange(100.0))
    made = build(of(values), horizon=5, windows=(10,))
    batch = made.train.on_device(made.train.fetch(torch.arange(len(made.train))), SampleRng(0, 0))
    assert float(batch["target"].std()) == pytest.approx(1, rel=0.1)
    assert float(made.evaluation.center_S[0]) == pytest.approx(values[:80].mean(), abs=1e-3)


def test_yearly_series_have_no_calendar():
    made = build(of(np.arange(60.0), frequency=Frequency("months", 12, DAILY.first)), horizon=2, windows=(5,))
    batch = made.train.on_device(made.train.fetch(torch.arange(3)), SampleRng(0, 0))
    assert made.model_args["num_channels"] == 2
    assert batch["future_known"].shape == (3, 2, 0)


HOURLY = Frequency("time", 3_600_000_000, DAILY.first)
MONTHS = {every: Frequency("months", every, DAILY.first) for every in (1, 3, 12)}


@pytest.mark.parametrize(
    ("frequency", "steps", "horizon", "windows"),
    [
        (DAILY, 1500, 7, [30, 60, 90]),
        (DAILY, 100, 7, [30, 60]),
        (DAILY, 30, 3, [10]),
        (DAILY, 5, 1, [1]),
        (Frequency("business", 1, DAILY.first), 500, 5, [20, 40, 60]),
        (HOURLY, 4000, 24, [48, 168]),
        (HOURLY, 300, 24, [48, 168]),
        (HOURLY, 200, 20, [48]),
        (Frequency("time", 1_800_000_000, DAILY.first), 9000, 48, [96, 336]),
        (Frequency("time", 900_000_000, DAILY.first), 9000, 96, [192]),
        (Frequency("time", 7 * 86_400_000_000, DAILY.first), 600, 13, [52, 104]),
        (MONTHS[1], 144, 12, [24, 36, 60]),
        (MONTHS[3], 84, 4, [8, 12, 20]),
        (MONTHS[12], 60, 6, [8, 16, 32]),
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


def test_two_rows_are_too_few(tmp_path: Path):
    file = tmp_path / "two.csv"
    file.write_text("date,v\n2024-01-01,1\n2024-01-02,2\n")
    with pytest.raises(DataError, match="no series is long enough. The longest, 'v', has 2 steps of 1 day"):
        datasets(str(file))
