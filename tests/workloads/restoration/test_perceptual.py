import importlib

import pytest
import torch

from wellfed import ConfigError
from workloads.restoration.perceptual import FixedFeatures, vgg_features


def images(size: int = 32) -> torch.Tensor:
    return torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(0))


def test_equal_images_differ_by_nothing_and_noisy_ones_by_more_with_the_noise():
    features, clean = FixedFeatures(), images()
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(1))
    differences = [features(clean + strength * noise, clean).item() for strength in (0.0, 0.02, 0.1, 0.4)]
    assert differences[0] == 0
    assert differences == sorted(differences)


def test_gradients_reach_the_restored_image_alone():
    restored, clean = images().requires_grad_(), images().flip(0).requires_grad_()
    FixedFeatures()(restored, clean).backward()
    assert restored.grad.abs().sum() > 0
    assert clean.grad is None


def test_vgg_says_what_is_missing(monkeypatch: pytest.MonkeyPatch):
    def absent(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(ConfigError, match=r"perceptual: vgg, but neither torchvision nor timm .* perceptual=fixed"):
        vgg_features()
