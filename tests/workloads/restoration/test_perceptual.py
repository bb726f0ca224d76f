import importlib
import itertools
import types

import pytest
import torch
from torch import nn

from wellfed import ConfigError
from workloads.restoration import perceptual
from workloads.restoration.perceptual import FixedFeatures, gabor_pairs, orthogonal_patterns, vgg_features


def images(size: int = 32) -> torch.Tensor:
    return torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(0))


def test_filters_have_length_one_and_no_mean():
    even, odd = gabor_pairs()
    for filters in (even, odd, orthogonal_patterns()):
        flat = filters.flatten(1)
        assert torch.allclose(flat.norm(dim=1), torch.ones(len(flat)), atol=1e-5)
        assert flat.sum(1).abs().max() < 1e-5
    patterns = orthogonal_patterns().flatten(1)
    assert torch.allclose(patterns @ patterns.T, torch.eye(len(patterns)), atol=1e-5)
    assert torch.equal(orthogonal_patterns(), orthogonal_patterns())


def test_equal_images_differ_by_nothing_and_noisy_ones_by_more_with_the_noise():
    features, clean = FixedFeatures(), images()
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(1))
    differences = [features(clean + strength * noise, clean).item() for strength in (0.0, 0.02, 0.1, 0.4)]
    assert differences[0] == 0
    assert differences == sorted(differences)


def test_a_direction_is_found_where_the_stripes_lie():
    stripes = torch.sin(torch.arange(32) * torch.pi / 2 + 0.3).expand(1, 3, 32, 32) * 0.5 + 0.5
    energy = FixedFeatures().features(stripes)[0][0, : perceptual.NUM_ORIENTATIONS].mean((1, 2))
    assert energy.argmax() == 0  # waves along the width
    assert energy[0] > 5 * energy[perceptual.NUM_ORIENTATIONS // 2]


def test_a_shifted_texture_differs_less_by_features_than_by_pixels():
    features = FixedFeatures()
    texture = torch.sin(torch.arange(64) * torch.pi / 2.5).expand(1, 3, 64, 64) * 0.3 + 0.5
    shifted, flat = texture.roll(1, -1), torch.full_like(texture, 0.5)
    energy = [features.features(each)[0][:, :6] for each in (texture, shifted, flat)]
    assert (energy[1] - energy[0]).abs().mean() < 0.1 * (energy[2] - energy[0]).abs().mean()
    assert (shifted - texture).abs().mean() > (flat - texture).abs().mean()


def test_gradients_reach_the_restored_image_alone():
    restored, clean = images().requires_grad_(), images().flip(0).requires_grad_()
    FixedFeatures()(restored, clean).backward()
    assert restored.grad.abs().sum() > 0
    assert clean.grad is None


def test_small_images_are_compared_at_the_scales_that_they_have():
    assert len(FixedFeatures().features(images(8))) == 1
    assert torch.isfinite(FixedFeatures()(images(8), images(8).flip(0)))


def test_vgg_says_what_is_missing(monkeypatch: pytest.MonkeyPatch):
    def absent(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(ConfigError, match=r"perceptual: vgg, but neither torchvision nor timm .* perceptual=fixed"):
        vgg_features()


def small_vgg() -> nn.Module:
    sizes = [3, 64, 64, 128, 128, 256, 256, 256, 512]
    return nn.Sequential(*(nn.Conv2d(a, b, 3, padding=1) for a, b in itertools.pairwise(sizes)))


@pytest.mark.parametrize("package", ["torchvision.models", "timm"])
def test_vgg_of_an_installed_package_is_taken(monkeypatch: pytest.MonkeyPatch, package: str):
    network = small_vgg()
    installed = types.SimpleNamespace(vgg16=lambda weights: network, create_model=lambda name, pretrained: network)

    def found(name: str) -> types.SimpleNamespace:
        if name != package:
            raise ModuleNotFoundError(name)
        return installed

    monkeypatch.setattr(importlib, "import_module", found)
    features = vgg_features()
    assert [each.shape[1] for each in features.features(images(16))] == [64, 128, 256]
    assert features(images(16), images(16)).item() == 0
    assert not list(features.parameters())
    assert not features.state_dict()


def test_weights_that_can_not_be_fetched_are_told(monkeypatch: pytest.MonkeyPatch):
    def unreachable(weights: str) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr(importlib, "import_module", lambda name: types.SimpleNamespace(vgg16=unreachable))
    with pytest.raises(ConfigError, match="weights can't be had: Name or service not known"):
        vgg_features()
