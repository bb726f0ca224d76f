"""Computes log-mel spectrograms of sound on any device.

Shapes: B clips, L samples, T frames, W samples of a frame, F frequencies, M mel bands.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

FRAME_S, HOP_S = 0.025, 0.010
LOWEST_HZ = 20.0
FLOOR = 1e-6
"""Power added to each band before the logarithm, for samples in -1..1; about the power of 16-bit noise."""
PRECISION = torch.float64
"""Precision before the logarithm. In float32, FFTs of CPU and GPU would differ in a quiet band next to a loud one, and
TF32 would round the sums over frequencies."""


CHUNK = 64
"""Clips at a time, so that a large batch needs at most 80 MiB of temporary memory (a second at 16 kHz)."""


class LogMel:
    """Natural logarithm of the power in ``num_mels`` bands, in frames of 25 ms every 10 ms."""

    def __init__(self, sample_rate: int, num_samples: int, num_mels: int) -> None:
        self.sample_rate, self.num_samples, self.num_mels = sample_rate, num_samples, num_mels
        self.window, self.hop = round(FRAME_S * sample_rate), round(HOP_S * sample_rate)
        self.num_frames = 1 + (num_samples - self.window) // self.hop
        window_W = torch.hann_window(self.window, dtype=PRECISION) / 2**15
        self._constants = {"cpu": (window_W, mel_bank(sample_rate, self.window, num_mels))}
        """Window and filter bank, by device."""

    def __call__(self, audio_BL: Tensor) -> Tensor:
        """Computes float32 [B, M, T] from int16 [B, L]."""
        window_W, bank_FM = self._on(audio_BL.device)
        found = []
        for part_BL in audio_BL.split(CHUNK):  # type: ignore[no-untyped-call]
            frames_BTW = part_BL.to(PRECISION).unfold(1, self.window, self.hop) * window_W
            power_BTF = torch.view_as_real(torch.fft.rfft(frames_BTW)).square().sum(-1)
            found.append((power_BTF @ bank_FM + FLOOR).log().float().transpose(1, 2))
        return torch.cat(found)

    def frames_between(self, sample_N2: Tensor) -> Tensor:
        """Returns first frame and end, int64 [N, 2], of the frames with their middle between two samples; at least one
        frame."""
        frame_N2 = ((sample_N2 - self.window / 2) / self.hop).ceil().long()
        first_N = frame_N2[:, 0].clamp(0, self.num_frames - 1)
        return torch.stack([first_N, frame_N2[:, 1].clamp(max=self.num_frames).maximum(first_N + 1)], 1)

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        found = self._constants.get(str(device))
        if found is None:
            window_W, bank_FM = self._constants["cpu"]
            found = self._constants[str(device)] = window_W.to(device), bank_FM.to(device)
        return found

    def __reduce__(self) -> tuple[type[LogMel], tuple[int, int, int]]:
        return LogMel, (self.sample_rate, self.num_samples, self.num_mels)


def mel_bank(sample_rate: int, window: int, num_mels: int) -> Tensor:
    """Returns triangles [F, M] with peaks of 1, evenly spaced on the mel scale, each between its neighbours' peaks.

    A band narrower than the distance of two frequencies gets the frequency nearest to its peak.
    """
    hz_F = torch.arange(window // 2 + 1, dtype=PRECISION) * (sample_rate / window)
    mel_E = torch.linspace(mel(LOWEST_HZ), mel(sample_rate / 2), num_mels + 2, dtype=PRECISION)
    edge_E = 700 * (torch.exp(mel_E / 1127) - 1)
    below_M, top_M, above_M = edge_E[:-2], edge_E[1:-1], edge_E[2:]
    rising_FM = (hz_F[:, None] - below_M) / (top_M - below_M)
    falling_FM = (above_M - hz_F[:, None]) / (above_M - top_M)
    bank_FM = torch.minimum(rising_FM, falling_FM).clamp(min=0)
    empty_M = bank_FM.sum(0) == 0
    nearest_M = (hz_F[:, None] - top_M).abs().argmin(0)
    bank_FM[nearest_M[empty_M], empty_M.nonzero().squeeze(1)] = 1
    return bank_FM


def mel(hz: float) -> float:
    """Returns the position of a frequency on the mel scale."""
    return 1127 * math.log(1 + hz / 700)
