import pytest
import torch

from wellfed import ConfigError
from workloads.hyperspectral.model import SpectralPatchCNN

SMALL = {"base_channels": 8, "num_blocks": 1, "spectral_filters": 2}


def batch_of(num_channels: int, side: int, count: int = 6) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(0)
    patch = torch.randn(count, num_channels, side, side, generator=drawn)
    return {"patch": patch, "label": torch.arange(count) % 3, "place": torch.arange(count)}


@pytest.mark.parametrize(("num_channels", "side"), [(1, 1), (5, 3), (40, 9)])
@pytest.mark.parametrize("filters", [0, 2])
def test_any_number_of_bands_and_any_side_will_do(num_channels: int, side: int, filters: int):
    model = SpectralPatchCNN(num_channels, 3, **SMALL | {"spectral_filters": filters})
    batch = batch_of(num_channels, side)
    assert model(batch).shape == (6, 3)
    output = model.loss(batch)
    output.loss.backward()
    assert output.num_samples == 6
    assert set(output.metrics) == {"accuracy"}
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_pixels_without_a_label_do_not_count():
    model = SpectralPatchCNN(5, 3, **SMALL).eval()
    batch = batch_of(5, 3)
    some = model.loss({name: values[:4] for name, values in batch.items()})
    held_out = model.loss(batch | {"label": torch.tensor([0, 1, 2, 0, -1, -1])})
    assert torch.allclose(held_out.loss, some.loss)
    assert torch.equal(held_out.metrics["accuracy"], some.metrics["accuracy"])
    assert model.loss(batch | {"label": torch.full((6,), -1)}).loss == 0


def test_all_faults_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        SpectralPatchCNN(5, 3, base_channels=0, num_blocks=0, spectral_filters=-1, spectral_stride=0, dropout=1.0)
    assert [fault.where.rpartition(".")[2] for fault in caught.value.faults] == [
        "base_channels",
        "num_blocks",
        "spectral_stride",
        "spectral_filters",
        "dropout",
    ]
