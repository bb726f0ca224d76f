"""Restores images with a residual network at half resolution, where each layer costs a quarter.

Shapes: B images, H height, W width, C channels of the network; 3 colours, 12 = 4 x 3 of the half-size image. Half
resolution: Zhang, Zuo, Zhang, FFDNet, IEEE TIP 2018, https://arxiv.org/abs/1710.04026
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from wellfed import ConfigError, LossOutput
from workloads.restoration.perceptual import PERCEPTUAL, FixedFeatures, vgg_features

GREY = 0.5
"""Value subtracted before the first layer."""
SHRINK = 2
"""Side of the pixel blocks that become channels."""
COLOURS = 3


class RestorationCNN(nn.Module):
    """A network that adds a correction to a degraded image of any size.

    There is no normalisation, since the input's scale shows the strength of the noise. Each block starts as identity.
    The first layer gets brightness, colours and details separately (`frequencies`). Otherwise the large brightness
    slows down learning of the rest.

    Args:
        base_channels: C.
        num_blocks: residual blocks of two convolutions each.
        perceptual_weight: weight of the loss on fixed features, relative to pixels; 0 = none.
        perceptual: ``fixed`` = filters of this package; ``vgg`` needs torchvision or timm.

    Raises:
        ConfigError: an argument is out of range, or ``vgg`` lacks its package or weights.
    """

    frequencies: Tensor
    """Matrix [12, 12, 1, 1] of `frequencies`."""

    def __init__(
        self,
        *,
        base_channels: int = 32,
        num_blocks: int = 4,
        perceptual_weight: float = 0.0,
        perceptual: str = "fixed",
    ) -> None:
        super().__init__()
        sizes = {"base_channels": base_channels, "num_blocks": num_blocks}
        weight = "perceptual_weight", perceptual_weight, perceptual_weight >= 0
        known = "perceptual", perceptual, perceptual in PERCEPTUAL
        ConfigError.check(
            "workload.model",
            *((name, size, size >= 1, "is below 1", f"{name}=8 or so") for name, size in sizes.items()),
            (*weight, "is negative", "perceptual_weight=0.1, or 0 for none"),
            (*known, f"is none of {', '.join(PERCEPTUAL)}", "perceptual=fixed"),
        )
        self.num_blocks, self.perceptual_weight = num_blocks, perceptual_weight
        inner = COLOURS * SHRINK**2
        self.register_buffer("frequencies", frequencies(), persistent=False)
        self.head = nn.Conv2d(inner, base_channels, 3, padding=1)
        self.blocks = nn.Sequential(*(ResidualBlock(base_channels) for _ in range(num_blocks)))
        self.tail = nn.Conv2d(base_channels, inner, 3, padding=1)
        _silence(self.tail)
        self.features_of: nn.Module | None = None
        if perceptual_weight > 0:
            self.features_of = FixedFeatures() if perceptual == "fixed" else vgg_features()

    @property
    def reach(self) -> int:
        """Distance in pixels beyond which the input does not affect the output; tiles with such a halo are exact."""
        return SHRINK * (2 + 2 * self.num_blocks) + SHRINK - 1

    def forward(self, degraded_BCHW: Tensor) -> Tensor:
        """Returns restored images [B, 3, H, W] in the input's dtype, unclipped; parameters may have another dtype."""
        height, width = degraded_BCHW.shape[-2:]
        even = functional.pad(degraded_BCHW, (0, width % SHRINK, 0, height % SHRINK), mode="replicate")
        pixels = functional.pixel_unshuffle(even.to(self.head.weight.dtype) - GREY, SHRINK)
        hidden = self.head(functional.conv2d(pixels, self.frequencies))
        found = functional.pixel_shuffle(self.tail(self.blocks(hidden) + hidden), SHRINK)
        return degraded_BCHW + found[..., :height, :width].to(degraded_BCHW.dtype)

    def loss(self, batch: dict[str, Tensor]) -> LossOutput:
        """Returns the mean absolute difference of pixels, and of fixed features if configured.

        Args:
            batch: ``degraded`` and ``clean``, float [B, 3, H, W] in 0..1.
        """
        restored, clean = self(batch["degraded"]).float(), batch["clean"].float()
        loss = functional.l1_loss(restored, clean)
        mse_B = (restored.detach() - clean).square().flatten(1).mean(1)
        metrics = {"psnr": (-10 * mse_B.clamp(min=1e-10).log10()).mean()}
        if self.features_of is not None:
            difference = self.features_of(restored, clean)
            metrics["perceptual"] = difference.detach()
            loss = loss + self.perceptual_weight * difference
        return LossOutput(loss, metrics, num_samples=len(clean))


class ResidualBlock(nn.Module):
    """A residual block of two convolutions, zero at initialisation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        _silence(self.second)

    def forward(self, hidden_BCHW: Tensor) -> Tensor:
        """Returns a tensor of the same shape."""
        found: Tensor = self.second(functional.relu(self.first(hidden_BCHW)))
        return hidden_BCHW + found


def frequencies() -> Tensor:
    """Returns the orthonormal matrix [12, 12, 1, 1] that turns the 12 values of a block into its mean and three
    differences, each of brightness and of two colour differences."""
    places_44 = torch.tensor([[1.0, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])
    colours_33 = torch.tensor([[1.0, 1, 1], [1, 0, -1], [1, -2, 1]])
    both = [each / each.norm(dim=1, keepdim=True) for each in (colours_33, places_44)]
    return torch.kron(*both).contiguous()[:, :, None, None]


def _silence(layer: nn.Conv2d) -> None:
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
