"""Compares images by features that are never trained, so that shifted textures match.

Shapes: B images, H height, W width, F filters, K side of a filter. After Johnson, Alahi, Fei-Fei, Perceptual Losses for
Real-Time Style Transfer, ECCV 2016, https://arxiv.org/abs/1603.08155; energy of filter pairs in quadrature: Adelson,
Bergen, JOSA A 1985, https://doi.org/10.1364/JOSAA.2.000284
"""

from __future__ import annotations

import importlib
import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from wellfed import ConfigError, Fault

PerceptualName = Literal["fixed", "vgg"]
PERCEPTUAL: tuple[PerceptualName, ...] = get_args(PerceptualName)
NUM_SCALES = 3
NUM_ORIENTATIONS = 6
FILTER_SIDE = 7
NUM_RANDOM = 16
FILTER_SEED = 0
LUMA = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in brightness: ITU-R BT.601."""
VGG_MEAN, VGG_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and spread of VGG's training images: https://docs.pytorch.org/vision/stable/models.html"""
VGG_LAYERS = (64, 64, "pool", 128, 128, "pool", 256, 256, 256)
"""Layers of VGG-16 up to relu3_3."""


class FixedFeatures(nn.Module):
    """Edges by direction, and random colour patterns, at three scales; not trained, not in checkpoints."""

    even: Tensor
    """Even filters [F, 1, K, K]."""
    odd: Tensor
    pattern: Tensor
    """Patterns [16, 3, K, K]."""
    luma: Tensor
    """Weights [1, 3, 1, 1]."""

    def __init__(self) -> None:
        super().__init__()
        even, odd = gabor_pairs()
        self.register_buffer("even", even, persistent=False)
        self.register_buffer("odd", odd, persistent=False)
        self.register_buffer("pattern", orthogonal_patterns(), persistent=False)
        self.register_buffer("luma", torch.tensor(LUMA).view(1, 3, 1, 1), persistent=False)

    def features(self, image_B3HW: Tensor) -> list[Tensor]:
        """Returns energies by direction, and patterns, for each scale at least as large as a filter, float32 [B, F +
        16, H, W]."""
        found, image_B3HW = [], image_B3HW.to(self.luma.dtype)
        for scale in range(NUM_SCALES):
            image_B3HW = functional.avg_pool2d(image_B3HW, 2) if scale else image_B3HW
            if min(image_B3HW.shape[-2:]) < FILTER_SIDE:
                break
            luma = functional.conv2d(image_B3HW, self.luma)
            even, odd = functional.conv2d(luma, self.even), functional.conv2d(luma, self.odd)
            energy = (even.float().square() + odd.float().square() + 1e-5).sqrt()
            patterns = functional.relu(functional.conv2d(image_B3HW, self.pattern))
            found.append(torch.cat([energy, patterns.float()], 1))
        return found

    def forward(self, restored_B3HW: Tensor, clean_B3HW: Tensor) -> Tensor:
        """Returns the mean absolute difference, a mean over the batch; images need at least 7 pixels a side."""
        with torch.no_grad():
            wanted = self.features(clean_B3HW)
        return _mean_difference(self.features(restored_B3HW), wanted)


def gabor_pairs() -> tuple[Tensor, Tensor]:
    """Returns waves with a period of four pixels under a Gaussian, by direction: even and odd, of mean 0, [F, 1, K, K]
    each."""
    place_K = torch.arange(FILTER_SIDE, dtype=torch.float64) - FILTER_SIDE // 2
    window_KK = torch.exp(-(place_K[:, None] ** 2 + place_K**2) / (2 * 1.8**2))
    filters: tuple[list[Tensor], list[Tensor]] = ([], [])
    for number in range(NUM_ORIENTATIONS):
        angle = math.pi * number / NUM_ORIENTATIONS
        along_KK = (math.cos(angle) * place_K + math.sin(angle) * place_K[:, None]) * (2 * math.pi / 4)
        for wave_KK, kept in zip((along_KK.cos(), along_KK.sin()), filters, strict=True):
            flat_KK = window_KK * (wave_KK - (window_KK * wave_KK).sum() / window_KK.sum())
            kept.append((flat_KK / flat_KK.norm()).float())
    even, odd = (torch.stack(kept).unsqueeze(1) for kept in filters)
    return even, odd


def orthogonal_patterns() -> Tensor:
    """Returns random colour patterns of length 1 and mean 0, orthogonal to each other, [16, 3, K, K]."""
    drawn = torch.randn(3 * FILTER_SIDE**2, NUM_RANDOM, generator=torch.Generator().manual_seed(FILTER_SEED)).double()
    basis, _ = torch.linalg.qr(drawn - drawn.mean(0))
    patterns: Tensor = basis.T.reshape(NUM_RANDOM, 3, FILTER_SIDE, FILTER_SIDE).float().contiguous()
    return patterns


class VggFeatures(nn.Module):
    """First layers of a trained VGG-16. Its weights are buffers outside of checkpoints, loaded for each run."""

    mean: Tensor
    std: Tensor

    def __init__(self, convolutions: list[nn.Conv2d]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(VGG_MEAN).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(VGG_STD).view(1, 3, 1, 1), persistent=False)
        for number, each in enumerate(convolutions):
            assert each.bias is not None
            self.register_buffer(f"weight_{number}", each.weight.detach().clone(), persistent=False)
            self.register_buffer(f"bias_{number}", each.bias.detach().clone(), persistent=False)

    def features(self, image_B3HW: Tensor) -> list[Tensor]:
        """Returns the features after the last layer before each pooling."""
        hidden, number, found = (image_B3HW.to(self.mean.dtype) - self.mean) / self.std, 0, []
        for layer in VGG_LAYERS:
            if layer == "pool":
                found.append(hidden)
                hidden = functional.max_pool2d(hidden, 2)
                continue
            weight, bias = getattr(self, f"weight_{number}"), getattr(self, f"bias_{number}")
            hidden = functional.relu(functional.conv2d(hidden, weight, bias, padding=1))
            number += 1
        return [*found, hidden]

    def forward(self, restored_B3HW: Tensor, clean_B3HW: Tensor) -> Tensor:
        """Returns the mean absolute difference, a mean over the batch; images need at least 4 pixels a side."""
        with torch.no_grad():
            wanted = self.features(clean_B3HW)
        return _mean_difference(self.features(restored_B3HW), wanted)


def vgg_features() -> VggFeatures:
    """Returns features with weights from torchvision or timm, downloaded if necessary.

    Raises:
        ConfigError: neither package is installed, or the weights are not available.
    """
    try:
        network = _trained_vgg()
    except ImportError as error:
        raise _lacking("neither torchvision nor timm is installed", "Install torchvision") from error
    except (OSError, RuntimeError) as error:
        raise _lacking(f"its weights can't be had: {error}", "Fetch them once where there is a network") from error
    convolutions = [each for each in network.modules() if isinstance(each, nn.Conv2d)]
    return VggFeatures(convolutions[: sum(layer != "pool" for layer in VGG_LAYERS)])


def _trained_vgg() -> nn.Module:
    try:
        models = importlib.import_module("torchvision.models")
    except ImportError:
        timm = importlib.import_module("timm")
        network: nn.Module = timm.create_model("vgg16", pretrained=True)
    else:
        network = models.vgg16(weights="IMAGENET1K_V1")
    return network


def _lacking(problem: str, way_out: str) -> ConfigError:
    return ConfigError(
        [Fault("workload.model.perceptual", f"vgg, but {problem}.", f"{way_out}, or write perceptual=fixed.")]
    )


def _mean_difference(found: list[Tensor], wanted: list[Tensor]) -> Tensor:
    """Returns the mean over the layers of the mean absolute differences, float32."""
    parts = [functional.l1_loss(one.float(), other.float()) for one, other in zip(found, wanted, strict=True)]
    return torch.stack(parts).mean()
