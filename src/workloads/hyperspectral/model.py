"""Classifies a pixel from the patch around it: filters along the spectrum, then convolutions over the ground.

Shapes: B patches, C channels (bands or components), P side of a patch, F filters, D positions along the spectrum, E
width. 3D then 2D: Roy, Krishna, Dubey, Chaudhuri, HybridSN, IEEE GRSL 2020, https://arxiv.org/abs/1902.06701
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy, gelu

from wellfed import ConfigError, LossOutput

SPECTRAL_REACH = 7
"""Number of bands that a spectral filter covers."""


class SpectralPatchCNN(nn.Module):
    """A network that returns the logits of a patch's middle pixel.

    Args:
        num_channels: C; the data pass it and ``num_classes``.
        base_channels: E.
        num_blocks: residual blocks of two 3 x 3 convolutions.
        spectral_filters: F, filters of a first 3D convolution; 0 = none.
        spectral_stride: distance between filters in bands.
        dropout: share dropped before the last layer, in training.
        label_smoothing: smoothing of the cross-entropy in training.
    """

    def __init__(
        self,
        num_channels: int,
        num_classes: int,
        *,
        base_channels: int = 32,
        num_blocks: int = 2,
        spectral_filters: int = 4,
        spectral_stride: int = 3,
        dropout: float = 0.1,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        sizes = {"base_channels": base_channels, "num_blocks": num_blocks, "spectral_stride": spectral_stride}
        shares = {"dropout": dropout, "label_smoothing": label_smoothing}
        filters = "spectral_filters", spectral_filters, spectral_filters >= 0
        ConfigError.check(
            "workload.model",
            *((name, size, size >= 1, "is below 1", f"{name}=2 or so") for name, size in sizes.items()),
            (*filters, "is negative", "spectral_filters=8, or 0 for none"),
            *((name, share, 0 <= share < 1, "is not in [0, 1)", f"{name}=0.1 or so") for name, share in shares.items()),
        )
        self.label_smoothing = label_smoothing
        width = num_channels
        self.spectral: nn.Module | None = None
        if spectral_filters:
            kernel, reach = (SPECTRAL_REACH, 3, 3), (SPECTRAL_REACH // 2, 1, 1)
            self.spectral = nn.Conv3d(1, spectral_filters, kernel, (spectral_stride, 1, 1), reach)
            self.spectral_norm = nn.GroupNorm(_groups(spectral_filters), spectral_filters)
            width += spectral_filters * (1 + (num_channels - 1) // spectral_stride)
        self.mix = nn.Conv2d(width, base_channels, 1)
        self.blocks = nn.Sequential(*(PatchBlock(base_channels) for _ in range(num_blocks)))
        self.norm = nn.LayerNorm(2 * base_channels)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(2 * base_channels, num_classes)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Returns logits [B, classes] for ``patch`` float [B, C, P, P]."""
        patch_BCPP = batch["patch"].to(self.out.weight.dtype)
        hidden = patch_BCPP
        if self.spectral is not None:
            found_BFDPP = gelu(self.spectral_norm(self.spectral(patch_BCPP.unsqueeze(1))))
            hidden = torch.cat([patch_BCPP, found_BFDPP.flatten(1, 2)], 1)
        hidden_BEPP = self.blocks(self.mix(hidden))
        middle = hidden_BEPP.shape[-1] // 2
        seen_B2E = torch.cat([hidden_BEPP[..., middle, middle], hidden_BEPP.mean((2, 3))], 1)
        logits: Tensor = self.out(self.dropout(self.norm(seen_B2E)))
        return logits

    def loss(self, batch: dict[str, Tensor]) -> LossOutput:
        """Returns the cross-entropy of ``label`` int64 [B] and ``accuracy``; pixels with label -1 do not count."""
        logits = self(batch).float()
        label_B = batch["label"]
        count = (label_B >= 0).sum().clamp(min=1)
        smoothing = self.label_smoothing if self.training else 0.0
        loss = cross_entropy(logits, label_B, ignore_index=-1, reduction="sum", label_smoothing=smoothing) / count
        accuracy = (logits.detach().argmax(1) == label_B).sum() / count
        return LossOutput(loss, {"accuracy": accuracy}, num_samples=len(label_B), predictions=logits, targets=label_B)


class PatchBlock(nn.Module):
    """A residual block of two convolutions, zero at initialisation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first_norm = nn.GroupNorm(_groups(channels), channels)
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second_norm = nn.GroupNorm(_groups(channels), channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        nn.init.zeros_(self.second.weight)
        assert self.second.bias is not None
        nn.init.zeros_(self.second.bias)

    def forward(self, hidden_BEPP: Tensor) -> Tensor:
        """Returns a tensor of the same shape."""
        found = self.first(gelu(self.first_norm(hidden_BEPP)))
        added: Tensor = self.second(functional.gelu(self.second_norm(found)))
        return hidden_BEPP + added


def _groups(channels: int) -> int:
    """Returns the largest of 8, 4, 2 and 1 that divides the channels."""
    return next(groups for groups in (8, 4, 2, 1) if channels % groups == 0)
