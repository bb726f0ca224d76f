"""Repeats the last season of a window: the baseline for every other forecast.

Shapes: B batch, L steps of history, H horizon, P steps of a season, K seasons in a window.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def seasonal_naive(value_BL: Tensor, observed_BL: Tensor, season: int, horizon: int) -> Tensor:
    """Returns for each future step the value one season before, [B, H].

    A missing value is replaced by an earlier season's, else by the last known value. An empty window gives 0.

    Args:
        value_BL: windows, the latest step last.
        observed_BL: 1 or True for each present value.
        season: P, at least 1; may be longer than the window.
        horizon: H; after one season the forecast repeats itself.
    """
    last_BP = last_of_each_phase(value_BL, observed_BL, season)
    return last_BP[:, torch.arange(horizon, device=value_BL.device) % season]


def last_of_each_phase(value_BL: Tensor, observed_BL: Tensor, season: int) -> Tensor:
    """Returns the latest value of each phase of the season, [B, P]; phase 0 is the phase of the first future step."""
    value_BKP, seen_BKP = in_seasons(value_BL, season), in_seasons(observed_BL.to(value_BL.dtype), season) > 0
    last_BP, any_BP = _latest(value_BKP, seen_BKP)
    last_B, any_B = _latest(value_BL, observed_BL > 0)
    fallback_B1 = torch.where(any_B, last_B, 0).unsqueeze(1)
    return torch.where(any_BP, last_BP, fallback_B1)


def in_seasons(value_BL: Tensor, season: int) -> Tensor:
    """Returns the window by seasons, [B, K, P]. The last season ends with the window; missing first steps are 0."""
    missing = -value_BL.shape[1] % season
    return pad(value_BL, (missing, 0)).reshape(len(value_BL), -1, season)


def _latest(value_BK: Tensor, seen_BK: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the last observed value along dimension 1, and whether there is one."""
    count = torch.arange(1, value_BK.shape[1] + 1, device=value_BK.device)
    count = count.view(1, -1, *[1] * (value_BK.dim() - 2))
    place_B = (count * seen_BK).amax(1)
    return value_BK.gather(1, (place_B - 1).clamp(min=0).unsqueeze(1)).squeeze(1), place_B > 0
