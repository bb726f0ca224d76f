import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wellfed import DataError, SampleRng
from workloads.forecast.data import build
from workloads.forecast.series import SeriesSet
from workloads.forecast.steps import Frequency

FIRST = np.datetime64("2024-01-01", "us")
DAILY = Frequency("time", 86_400_000_000, FIRST)
MODES = ("cache", "cache_host", "dynamic")


class Table:
    """The store held as a tensor, as the engine does."""

    def __init__(self, features):
        self.features, self.table = features, features.store()

    def rows(self, indices):
        return self.features.cut(self.table, indices)


@pytest.fixture(scope="module")
def found() -> SeriesSet:
    """Three series of unequal length and beginning, the second with gaps."""
    rng = np.random.default_rng(0)
    values = [rng.normal(50, 10, 200), rng.normal(-3, 0.1, 120), rng.normal(1e6, 5, 90)]
    values[1][[5, 6, 40, 41, 42, 99]] = np.nan
    return SeriesSet(["a", "b", "c"], values, [0, 30, -4], DAILY)


@pytest.fixture(scope="module")
def made(found: SeriesSet):
    return build(found, horizon=4, windows=(20, 8), passes=1)


def everything(data, features=None, mode="dynamic"):
    data = data.for_features(mode)
    rng = SampleRng(0, 0)
    return data.on_device(data.fetch(torch.arange(len(data)), rng), rng, features)


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_a_window_is_what_the_series_says(found, made, split: str):
    batch = everything(getattr(made, split))
    store = made.train._store
    for sample in range(0, len(batch["row"]), 3):
        series, window = int(batch["series"][sample]), int(batch["window"][sample])
        values = found.values[series]
        origin = int(batch["row"][sample]) + 20 - int(store.start_S[series])
        scale, center = store.scale_S[series], store.center_S[series]
        past = batch["history"][sample, 20 - window :]
        target, seen = batch["target"][sample], batch["target_observed"][sample] > 0
        for scaled, observed, true in (
            (past[:, 0], past[:, -1] > 0, values[origin - window : origin]),
            (target, seen, values[origin : origin + 4]),
        ):
            assert observed.tolist() == (~np.isnan(true)).tolist()
            again = (scaled * scale + center).numpy()
            assert np.allclose(again[observed], true[~np.isnan(true)], rtol=1e-6, atol=1e-6)
            assert (scaled[~observed] == 0).all()
        assert (batch["history"][sample, : 20 - window] == 0).all()


def test_targets_of_training_are_never_held_out_and_those_held_out_are_told_once(found, made):
    starts = made.train._store.start_S
    told = {}
    for split in ("train", "val", "test"):
        batch = everything(getattr(made, split))
        steps = [
            (int(s), int(row) + 20 - int(starts[s]) + h)
            for s, row in zip(batch["series"], batch["row"], strict=True)
            for h in range(4)
        ]
        told[split] = set(steps)
        if split != "train":
            assert len(steps) == 2 * len(told[split])  # for each of two windows
    assert told["train"].isdisjoint(told["val"] | told["test"])
    assert told["val"].isdisjoint(told["test"])
    for series, values in enumerate(found.values):
        held = sorted(step for s, step in told["test"] if s == series)
        assert held == list(range(len(values) - len(held), len(values)))
        assert len(held) == max(1, round(0.1 * len(values) / 4)) * 4


value = st.one_of(st.none(), st.floats(-1e6, 1e6))


@settings(max_examples=25, deadline=None)
@given(
    series=st.lists(st.lists(value, min_size=14, max_size=40), min_size=1, max_size=4),
    windows=st.sets(st.integers(1, 12), min_size=1, max_size=3),
    horizon=st.integers(1, 3),
    kind=st.sampled_from(["time", "months", "business"]),
)
def test_whatever_the_series_batches_are_finite_and_alike_in_all_modes(series, windows, horizon: int, kind):
    values = [np.array([0.0, *(np.nan if each is None else each for each in one), 1.0]) for one in series]
    frequency = Frequency(kind, DAILY.every if kind == "time" else 1, FIRST)
    made_of = SeriesSet([str(number) for number in range(len(values))], values, [0] * len(values), frequency)
    try:
        made = build(made_of, horizon=horizon, windows=tuple(windows))
    except DataError:
        return
    table = Table(made.features)
    for data in filter(None, (made.train, made.val, made.test)):
        batch, *others = (everything(data, table, mode) for mode in MODES)
        assert all(torch.equal(batch[name], other[name]) for other in others for name in batch)
        assert all(each.isfinite().all() for each in batch.values())
        assert (batch["history"][..., -1].sum(1) <= batch["window"]).all()
        assert (batch["target_observed"].sum(1) > 0).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fill", ["none", "forward", "linear", "zero"])
def test_no_forecast_is_scored_against_what_was_filled(mode: str, fill):
    values = np.sin(np.arange(300.0))
    values[[271, 272, 280, *range(284, 292)]] = np.nan  # of the test part: the last 32 steps, a whole horizon of them
    test = build(SeriesSet(["a"], [values], [0], DAILY), horizon=4, windows=(20,), fill=fill).test
    features = Table(test._store.features())
    batch = everything(test, features, mode)
    step = batch["row"][:, None] + torch.arange(4)  # the store has as many empty rows before the series as a window
    assert torch.equal(batch["target_observed"].bool(), torch.from_numpy(~np.isnan(values))[step])
    assert (batch["target_observed"].sum(1) > 0).all()
    history = batch["history"][..., -1].sum(1)
    assert (history == 20).all() if fill != "none" else (history < 20).any()
