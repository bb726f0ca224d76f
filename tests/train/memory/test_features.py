import pytest
import torch
from torch import nn

from wellfed.contract import Features
from wellfed.train.memory import features as room
from wellfed.train.memory.features import FeatureTable, hold, of_data

CPU = torch.device("cpu")
NUM_ROWS = 700  # more than two chunks


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.embed, self.layers = nn.Embedding(50, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.register_buffer("tokens", torch.randint(0, 50, (NUM_ROWS, 6)))
        self.asked = []

    def rows(self, indices):
        self.asked.append(len(indices))
        return self.layers(self.embed(self.tokens[indices])).mean(1)


@pytest.fixture
def encoder():
    torch.manual_seed(0)
    return Encoder().eval()


def features(encoder, **more):
    return Features(NUM_ROWS, NUM_ROWS * 16 * 4, encoder.rows, **more)


def test_every_mode_gives_the_same_rows(encoder):
    indices = torch.randint(0, NUM_ROWS, (64,))
    cached, hosted, computed = (
        hold(features(encoder), mode, CPU).rows(indices) for mode in ("cache", "cache_host", "dynamic")
    )
    assert cached.shape == (64, 16)
    assert cached.equal(hosted)
    assert (cached - computed).abs().max() < 1e-5
    assert cached.std() > 0.01


@pytest.mark.parametrize("mode", ["cache", "cache_host"])
def test_a_table_is_computed_once_in_chunks(encoder, mode):
    source = hold(features(encoder), mode, CPU)
    assert encoder.asked == [256, 256, 188]
    for _ in range(3):
        assert not source.rows(torch.arange(9)).requires_grad
    assert len(encoder.asked) == 3


def test_dynamic_asks_each_time_and_passes_gradients_on_only_to_what_is_trained(encoder):
    frozen = hold(features(encoder), "dynamic", CPU).rows(torch.arange(5))
    assert not frozen.requires_grad
    hold(features(encoder, trainable=True), "dynamic", CPU).rows(torch.arange(5)).sum().backward()
    assert encoder.asked == [5, 5]
    assert all(parameter.grad is not None for parameter in encoder.parameters())


@pytest.mark.parametrize("mode", ["cache", "cache_host"])
def test_what_is_trained_is_not_kept(encoder, mode):
    with pytest.raises(ValueError, match=f"memory.features={mode} would freeze .*only dynamic"):
        hold(features(encoder, trainable=True), mode, CPU)
    assert encoder.asked == []


def test_the_table_keeps_the_type_of_the_rows():
    source = hold(Features(3, 3, lambda indices: indices[:, None].bfloat16()), "cache", CPU)
    assert source.rows(torch.tensor([2, 0])).tolist() == [[2.0], [0.0]]
    assert source.rows(torch.tensor([2])).dtype == torch.bfloat16


def test_a_frozen_encoder_stays_in_eval_mode(encoder):
    model = nn.ModuleDict({"encoder": encoder, "head": nn.Linear(2, 2)})
    model.training = True
    FeatureTable(features(encoder), "cache", may_change=False).hold(model, CPU, lambda *_, **__: None)
    assert model.training
    assert model["head"].training
    assert not any(part.training for part in encoder.modules())


@pytest.mark.parametrize("mode", ["cache", "cache_host", "dynamic"])
def test_a_blank_source_gives_rows_of_the_same_kind_and_computes_one(encoder, mode):
    indices = torch.tensor([0, NUM_ROWS - 1])
    real, made = hold(features(encoder), mode, CPU), hold(features(encoder), mode, CPU, blank=True)
    expected = real.rows(indices)
    encoder.asked.clear()
    rows = hold(features(encoder), mode, CPU, blank=True).rows(indices)
    assert (rows.shape, rows.dtype, type(made)) == (expected.shape, expected.dtype, type(real))
    assert encoder.asked == ([2] if mode == "dynamic" else [1])


@pytest.mark.gpu
def test_on_a_gpu_every_mode_gives_the_same_rows(encoder):
    device = torch.device("cuda")
    encoder.to(device)
    indices = torch.randint(0, NUM_ROWS, (64,), device=device)
    rows = [hold(features(encoder), mode, device).rows(indices) for mode in ("cache", "cache_host", "dynamic")]
    assert {tensor.device.type for tensor in rows} == {"cuda"}
    assert rows[0].equal(rows[1])
    assert (rows[0] - rows[2]).abs().max() < 1e-5
    assert isinstance(hold(features(encoder), "cache_host", device), room.HostTable)


# -- rows that overlap -------------------------------------------------------------------------------------------------

WIDTH = 4


def windows(store):
    """Windows of WIDTH values of a series, each a row."""

    def cut(series, indices):
        return series.as_strided((len(series) - WIDTH + 1, WIDTH), (1, 1)).index_select(0, indices)

    return Features(
        len(store) - WIDTH + 1,
        store.nbytes,
        rows=lambda indices: cut(store, indices),
        store=lambda: store,
        cut=cut,
    )


@pytest.mark.parametrize("mode", ["cache", "cache_host", "dynamic"])
def test_rows_that_overlap_are_cut_from_their_store(mode):
    source = hold(of_data(windows(torch.arange(10.0))), mode, CPU)
    assert source.rows(torch.tensor([6, 0])).tolist() == [[6, 7, 8, 9], [0, 1, 2, 3]]


def test_a_store_is_held_in_the_place_of_a_table_of_rows():
    series = torch.arange(1000.0)
    held = hold(windows(series), "cache", CPU)
    assert held.table.nbytes == series.nbytes
    assert hold(windows(series), "cache", CPU, blank=True).table.equal(series)  # nothing is computed for it


def test_what_left_the_device_is_asked_of_the_data_again():
    for mode in ("cache_host", "dynamic"):
        table = FeatureTable(windows(torch.arange(10.0)), "cache", may_change=False)
        table.hold(nn.Linear(1, 1), CPU, lambda *_, **__: None)
        assert table.move_to(mode, CPU)
        assert isinstance(table.source, room.Computed)
        assert table.source.rows(torch.tensor([1])).tolist() == [[1, 2, 3, 4]]
