"""Classifies clips by convolutions over time, with mel bands as channels, so that each layer sees the whole spectrum.

Shapes: B clips, M mel bands, T frames, C channels, K classes. After TC-ResNet (Choi et al. 2019,
https://arxiv.org/abs/1904.03814), with GroupNorm.
"""

from __future__ import annotations

from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from wellfed import ConfigError, LossOutput

WIDTH = 9
"""Frames that a block's convolution covers."""
GROUPS = 4
EPSILON = 1e-5
"""Constant added to variances."""


class ClipClassifier(nn.Module):
    """A network that scores the classes of a log-mel spectrogram, normalised in two ways.

    The first removes each band's mean and spread over time, and with them the voice. The second removes only the whole
    clip's mean and spread, and with them the volume.

    Args:
        num_mels: M.
        num_classes: K.
        base_channels: C of the first layer, a multiple of 4; each block adds as many.
        num_blocks: residual blocks; each halves the frames.
        dropout: share of the time-averaged features dropped in training.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(
        self, num_mels: int, num_classes: int, *, base_channels: int = 24, num_blocks: int = 3, dropout: float = 0.1
    ) -> None:
        super().__init__()
        is_multiple = base_channels >= GROUPS and base_channels % GROUPS == 0
        ConfigError.check(
            "workload.model",
            ("base_channels", base_channels, is_multiple, f"is no multiple of {GROUPS}", "base_channels=24 or so"),
            ("num_blocks", num_blocks, 1 <= num_blocks <= 5, "is not in 1..5", "num_blocks=3 or so"),
            ("dropout", dropout, 0 <= dropout < 1, "is not in [0, 1)", "dropout=0.1, or 0"),
        )
        self.first = nn.Conv1d(2 * num_mels, base_channels, 3, padding=1, bias=False)
        sizes = [base_channels * (place + 1) for place in range(num_blocks + 1)]
        self.blocks = nn.Sequential(*(ResidualBlock(before, after) for before, after in pairwise(sizes)))
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(2 * sizes[-1], num_classes)

    def forward(self, log_mel_BMT: Tensor, is_sound_BT: Tensor | None = None) -> Tensor:
        """Returns scores [B, K].

        Args:
            is_sound_BT: False for ignored frames of silence around a clip; None = no such frames.
        """
        sound_B1T = None if is_sound_BT is None else is_sound_BT[:, None].to(log_mel_BMT.dtype)
        by_band = _standard(log_mel_BMT, sound_B1T, (2,))
        hidden_BCT = self.first(torch.cat([by_band, _standard(log_mel_BMT, sound_B1T, (1, 2))], 1))
        for block in self.blocks:
            if sound_B1T is not None:
                hidden_BCT = hidden_BCT * sound_B1T
                sound_B1T = functional.max_pool1d(sound_B1T, 2, ceil_mode=True)
            hidden_BCT = block(hidden_BCT)
        mean_BC1, spread_BC1 = _moments(hidden_BCT, sound_B1T, (2,))
        return cast(Tensor, self.last(self.dropout(torch.cat([mean_BC1, spread_BC1], 1).squeeze(2))))

    def loss(self, batch: dict[str, Tensor]) -> LossOutput:
        """Returns the cross entropy; ``accuracy`` is the share of clips whose class has the highest score.

        Args:
            batch: ``log_mel`` float [B, M, T], ``label`` int64 [B]; ``is_sound`` bool [B, T] if clips are padded.
        """
        score_BK, label_B = self(batch["log_mel"], batch.get("is_sound")).float(), batch["label"]
        is_right_B = score_BK.detach().argmax(1) == label_B
        return LossOutput(
            functional.cross_entropy(score_BK, label_B),
            {"accuracy": is_right_B.float().mean()},
            num_samples=len(label_B),
            predictions=score_BK.detach(),
            targets=label_B,
        )


class ResidualBlock(nn.Module):
    """A residual block of two convolutions over time; the first halves the frames."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.one = nn.Conv1d(before, after, WIDTH, stride=2, padding=WIDTH // 2, bias=False)
        self.one_norm = nn.GroupNorm(GROUPS, after)
        self.two = nn.Conv1d(after, after, WIDTH, padding=WIDTH // 2, bias=False)
        self.two_norm = nn.GroupNorm(GROUPS, after)
        self.past = nn.Conv1d(before, after, 1, stride=2, bias=False)
        self.past_norm = nn.GroupNorm(GROUPS, after)

    def forward(self, hidden_BCT: Tensor) -> Tensor:
        """Returns a tensor with half the frames."""
        found_BCT = functional.relu(self.one_norm(self.one(hidden_BCT)))
        found_BCT = self.two_norm(self.two(found_BCT))
        return functional.relu(found_BCT + self.past_norm(self.past(hidden_BCT)))


def _standard(values_BMT: Tensor, sound_B1T: Tensor | None, dims: tuple[int, ...]) -> Tensor:
    """Normalises by mean and spread of the sound over these dimensions; 0 without sound."""
    mean, spread = _moments(values_BMT, sound_B1T, dims)
    found_BMT = (values_BMT - mean) / spread
    return found_BMT if sound_B1T is None else found_BMT * sound_B1T


def _moments(values_BMT: Tensor, sound_B1T: Tensor | None, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Returns mean and spread of the sound over these dimensions, which are kept with size 1."""
    if sound_B1T is None:
        mean = values_BMT.mean(dims, keepdim=True)
        return mean, ((values_BMT - mean).square().mean(dims, keepdim=True) + EPSILON).sqrt()
    count = sound_B1T.sum(2, keepdim=True) * (values_BMT.shape[1] if 1 in dims else 1)
    mean = (values_BMT * sound_B1T).sum(dims, keepdim=True) / count
    variance = ((values_BMT - mean).square() * sound_B1T).sum(dims, keepdim=True) / count
    return mean, (variance + EPSILON).sqrt()
