"""Changes the sample rate with a windowed sinc in one strided convolution.

Shapes: B clips, L samples, K taps, N phases. After torchaudio's resample (https://github.com/pytorch/audio).
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

REACH = 12
"""Zero crossings of the sinc on either side."""
ROLLOFF = 0.97
"""Cut-off frequency as a share of the lower Nyquist frequency."""
MOST_PHASES = 2000
"""Maximum number of phases. The kernel has a row per phase and a tap per input sample; 11,127 to 16,000 Hz would take 2
GiB."""


def resample(sound_BL: Tensor, rate: int, wanted: int) -> Tensor:
    """Resamples to float32 [B, ceil(L * wanted / rate)]; the first sample keeps its time.

    Usual rates are exact. Other ratios become the nearest fraction of numbers up to 2,000. Rate and length are then
    wrong by at most 0.05 %, a hundredth of a semitone.
    """
    if rate == wanted:
        return sound_BL
    ratio = Fraction(min(rate, wanted), max(rate, wanted)).limit_denominator(MOST_PHASES)
    step, num_phases = (ratio if rate < wanted else 1 / ratio).as_integer_ratio()
    kernel_NK, before = _kernel(step, num_phases)
    length = sound_BL.shape[1]
    padded = functional.pad(sound_BL[:, None], (before, before + step))
    found_BNP = functional.conv1d(padded, kernel_NK[:, None], stride=step)
    return found_BNP.transpose(1, 2).flatten(1)[:, : -(-length * num_phases // step)]


@lru_cache(maxsize=8)
def _kernel(step: int, num_phases: int) -> tuple[Tensor, int]:
    """Returns taps [N, K] for each output sample of ``step`` input samples, and the number of leading taps."""
    cut = min(step, num_phases) * ROLLOFF
    before = math.ceil(REACH * step / cut)
    tap_K = torch.arange(-before, before + step, dtype=torch.float64) / step
    phase_N = torch.arange(num_phases, dtype=torch.float64) / num_phases
    time_NK = ((tap_K - phase_N[:, None]) * cut).clamp(-REACH, REACH)
    window_NK = torch.cos(time_NK * math.pi / REACH / 2).square()
    return (torch.sinc(time_NK) * window_NK * cut / step).float(), before
