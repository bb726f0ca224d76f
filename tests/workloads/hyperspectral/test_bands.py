import numpy as np
import pytest
import torch

from wellfed import ConfigError
from workloads.hyperspectral.bands import fit_components, fit_scaling


@pytest.fixture
def spectra() -> torch.Tensor:
    """200 pixels of 8 bands around 5,000 that follow 3 causes, and a band that is the same everywhere."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(200, 3)) @ rng.normal(size=(3, 7)) * 400 + 5000 + rng.normal(size=(200, 7))
    return torch.from_numpy(np.concatenate([values, np.full((200, 1), 7.0)], 1)).float()


def test_scaled_bands_have_mean_0_and_spread_1(spectra):
    scaled = fit_scaling(spectra)(spectra)
    assert torch.allclose(scaled.mean(0), torch.zeros(8), atol=1e-4)
    assert torch.allclose(scaled[:, :7].std(0, correction=0), torch.ones(7), atol=1e-4)
    assert (scaled[:, 7] == 0).all()


def test_components_are_those_of_the_singular_values(spectra):
    components = fit_components(spectra, 3)
    scaled = fit_scaling(spectra)(spectra).double()
    left, value, _ = torch.linalg.svd(scaled, full_matrices=False)
    expected = left[:, :3] * value[:3] / value[0] * len(spectra) ** 0.5
    found = components(spectra).double()
    assert torch.allclose(found.abs(), expected.abs(), atol=1e-3)
    assert components.kept_frac == pytest.approx(float((value[:3] ** 2).sum() / (value**2).sum()), abs=1e-6)
    assert components.kept_frac > 0.99


def test_more_components_than_there_can_be_are_refused(spectra):
    with pytest.raises(ConfigError, match="Write num_components=8 at most"):
        fit_components(spectra, 9)
    with pytest.raises(ConfigError, match="5 components of 8 bands and 4 training pixels.*num_components=3"):
        fit_components(spectra[:4], 5)
