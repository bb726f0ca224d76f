import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from wellfed import ConfigError, SampleRng
from workloads.forecast.data import datasets
from workloads.forecast.model import LSTMForecaster, Smoothing

SEASON, HORIZON, LONGEST, CHANNELS, SERIES = 7, 5, 28, 4, 3


def windows(size: int = 6, gaps: float = 0.2) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    history = torch.randn(size, LONGEST, CHANNELS, generator=draw)
    history[..., -1] = (torch.rand(size, LONGEST, generator=draw) >= gaps).float()
    history[..., 0] *= history[..., -1]
    return {
        "history": history,
        "future_known": torch.randn(size, HORIZON, CHANNELS - 2, generator=draw),
        "target": torch.randn(size, HORIZON, generator=draw),
        "target_observed": (torch.rand(size, HORIZON, generator=draw) >= gaps).float(),
        "series": torch.arange(size) % SERIES,
    }


def forecaster(**options: object) -> LSTMForecaster:
    """A model whose LSTM has a say from the start."""
    torch.manual_seed(0)
    chosen = {"hidden_size": 8, "num_layers": 2, "dropout": 0.0} | options
    model = LSTMForecaster(HORIZON, CHANNELS, SEASON, SERIES, **chosen)
    torch.nn.init.normal_(model.out.weight)
    return model


def test_missing_steps_count_nowhere():
    """Neither in the window nor in the horizon, whatever stands there."""
    model, batch = forecaster(), windows()
    other = {name: values.clone() for name, values in batch.items()}
    gone = batch["history"][..., -1] == 0
    assert gone.any()
    other["history"][..., 0][gone] = 1e3
    other["target"][batch["target_observed"] == 0] = 1e3
    assert torch.equal(model(batch), model(other))
    assert model.loss(batch).loss.item() == model.loss(other).loss.item()


@given(level=st.floats(-100, 100), slope=st.floats(-1, 1), season=st.lists(st.floats(-10, 10), min_size=1, max_size=9))
def test_a_line_with_a_season_is_continued_exactly_where_the_rates_say_so(
    level: float, slope: float, season: list[float]
):
    length, horizon, period = 40, 12, len(season)
    step = torch.arange(length + horizon, dtype=torch.float32)
    series = level + slope * step + torch.tensor(season).repeat(60)[: length + horizon]
    smoothing = Smoothing(period, horizon, 1)
    with torch.no_grad():  # the trend goes on, and the level is the last season's alone
        smoothing.shared_R.copy_(torch.tensor([-3.0, 3.0, 0.0, -3.0, -3.0, 3.0]))
        forecast, _, _ = smoothing(series[None, :length], torch.ones(1, length), torch.zeros(1, dtype=torch.long))
    assert torch.allclose(forecast[0], series[length:], atol=2e-3 * (1 + series.abs().max().item()))


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_it_runs_in_bfloat16_and_under_autocast():
    model, batch = forecaster(), windows()
    # oneDNN has no LSTM in bfloat16 for CPUs without AVX-512.
    with torch.backends.mkldnn.flags(enabled=False), torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = model.loss(batch).loss
    assert mixed.dtype == torch.float32
    assert mixed.item() == pytest.approx(model.loss(batch).loss.item(), rel=0.05)
    model.to(torch.bfloat16).loss(batch).loss.backward()


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"hidden_size": 0}, "hidden_size"),
        ({"num_layers": 0}, "num_layers"),
        ({"dropout": 1.0}, "dropout"),
        ({"huber_delta": 0.0}, "huber_delta"),
    ],
)
def test_arguments_out_of_range_are_named(arguments: dict[str, object], name: str):
    with pytest.raises(ConfigError, match=rf"workload\.model\.{name}: "):
        LSTMForecaster(HORIZON, CHANNELS, SEASON, SERIES, **arguments)


def test_it_learns_the_embedded_set_in_seconds():
    """Better than to repeat the last week, and than smoothing at the rates that it starts from."""
    data = datasets(windows=[28], num_series=8, num_days=700)
    torch.manual_seed(0)
    model = LSTMForecaster(**data.model_args, hidden_size=8, num_layers=1)
    before = scored(model, data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(0))
    for number, indices in enumerate(order.split(256)):
        batch = data.train.on_device(data.train.fetch(indices), SampleRng(0, 0, number))
        optimizer.zero_grad()
        model.loss(batch).loss.backward()
        optimizer.step()
    after = scored(model, data)
    assert after["mase"] < 0.9 * after["mase_seasonal_naive"]
    assert after["mase"] < 0.99 * before["mase"]


def scored(model: LSTMForecaster, data: object) -> dict[str, float]:
    indices = torch.arange(len(data.test))
    data.evaluation.reset()
    data.evaluation.update(model.eval(), data.test.on_device(data.test.fetch(indices), SampleRng(0, 0)))
    return data.evaluation.compute()
