"""Scales the bands of a cube, or computes principal components, fitted on the training pixels alone.

Shapes: N training pixels, C bands, K components.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from wellfed import ConfigError
from wellfed.units import counted

USUAL_COMPONENTS = 15
FARTHEST = 30.0
"""Maximum scaled value, in spreads of the training pixels. Else unmeasured pixels (-99999 outside the scene) would
dominate a patch."""
_PIXELS = 256
"""Number of pixels converted to float64 at a time."""


@dataclass(frozen=True)
class BandScaling:
    """Scaling of each band to (value - mean) / spread, on any device."""

    mean: Tensor
    """Mean of each band, float32 [C]."""
    spread: Tensor
    _moved: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False, compare=False)

    def __call__(self, values: Tensor) -> Tensor:
        """Scales values [..., C] of any type to float32."""
        name = str(values.device)
        found = self._moved.get(name)
        if found is None:
            found = self.mean.to(values.device), self.spread.to(values.device)
            if type(found[0]) is Tensor:  # skips fake tensors of the memory prediction
                self._moved[name] = found
        mean_C, spread_C = found
        return ((values.float() - mean_C) / spread_C).clamp(-FARTHEST, FARTHEST)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_moved": {}}


@dataclass(frozen=True)
class PrincipalComponents:
    """Principal components of the spectra, fitted on the training pixels, on the CPU."""

    mean: Tensor
    """Mean of each band, float32 [C]."""
    directions: Tensor
    """Directions, float32 [C, K], divided by the spread of the first component so that values are about 1."""
    kept_frac: float
    """Share of the training pixels' variance."""

    def __call__(self, values: Tensor) -> Tensor:
        """Projects values [..., C] of any type to float32 [..., K]."""
        return ((values.float() - self.mean) @ self.directions).clamp(-FARTHEST, FARTHEST)


def fit_scaling(spectra_NC: Tensor) -> BandScaling:
    """Returns mean and spread of the training pixels' bands; a constant band is only centred."""
    mean_C = _sum(part.sum(0) for part in _doubles(spectra_NC)) / len(spectra_NC)
    spread_C = (_sum((part - mean_C).square().sum(0) for part in _doubles(spectra_NC)) / len(spectra_NC)).sqrt()
    largest_C = torch.maximum(*(end.double().abs() for end in spectra_NC.aminmax(dim=0)))
    spread_C = torch.where(spread_C > 1e-9 * largest_C, spread_C, torch.ones_like(spread_C))
    return BandScaling(mean_C.float(), spread_C.float())


def _doubles(spectra_NC: Tensor) -> Iterator[Tensor]:
    """Yields float64 parts [<= `_PIXELS`, C]; all pixels at once would be larger than the cube."""
    return (part.double() for part in torch.split(spectra_NC, _PIXELS))


def _sum(parts: Iterable[Tensor]) -> Tensor:
    return reduce(torch.add, parts)


def chosen_components(spectra_NC: Tensor) -> int:
    """Returns the derived number of components: `USUAL_COMPONENTS`, or the possible maximum."""
    num_pixels, num_bands = spectra_NC.shape
    return max(1, min(USUAL_COMPONENTS, num_bands, num_pixels - 1))


def fit_components(spectra_NC: Tensor, num_components: int) -> PrincipalComponents:
    """Computes the first principal components of the training pixels from their covariance.

    Raises:
        ConfigError: more components than possible.
    """
    num_pixels, num_bands = spectra_NC.shape
    most = min(num_bands, num_pixels - 1)
    if num_components > most:
        raise ConfigError.of(
            "workload.data.num_components",
            f"{num_components} components of {counted(num_bands, 'band')} and {counted(num_pixels, 'training pixel')}.",
            f"Write num_components={most} at most, null to let the scene decide, or 0 for the bands as they are.",
        )
    scaling = fit_scaling(spectra_NC)
    centred = (scaling(part).double() for part in torch.split(spectra_NC, _PIXELS))
    value_C, vector_CC = torch.linalg.eigh(_sum(part.T @ part for part in centred) / num_pixels)
    value_K, vector_CK = value_C.flip(0)[:num_components], vector_CC.flip(1)[:, :num_components]
    total = float(value_C.clamp(min=0).sum())
    # The sign of a component is arbitrary; its largest entry is made positive.
    sign_K = vector_CK.gather(0, vector_CK.abs().argmax(0, keepdim=True)).sign()
    spread = value_K[0].clamp(min=1e-30).sqrt()
    kept_frac = float(value_K.clamp(min=0).sum()) / total if total > 0 else 1.0
    direction_CK = vector_CK * sign_K / (spread * scaling.spread.double()[:, None])
    return PrincipalComponents(scaling.mean, direction_CK.float(), kept_frac)
