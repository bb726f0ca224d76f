"""Degrades clean images for the model's input: noise, blur, or a loss of resolution.

Shapes: B images, C channels, H height, W width, M numbers of one image (C H W).
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from wellfed import ConfigError, SampleRng, seed_from

Rule = tuple[str, object, bool, str, str]
Task = Literal["denoise", "deblur", "super_resolve"]
TASKS: tuple[Task, ...] = get_args(Task)
USUAL_SIGMA: dict[str, float] = {"denoise": 25.0, "deblur": 2.0, "super_resolve": 0.0}
"""Task -> default spread of the noise, out of 255, as usual in the literature."""
BANK_NUMBERS = 2**22
"""Count of normal numbers (16 MiB) that training noise is cut from, at a random position with a random sign. Drawing
new ones would cost more than all other work on a patch. An image needs at most a quarter."""
PLACE_DRAW, SIGN_DRAW = 64, 65
"""Numbers of a sample's random draws for the noise; crops use lower ones."""
NOISE_SEED = 0x5EED


class Degradation:
    """Degradation of clean images: batches in training, whole images in evaluation.

    Args:
        task: ``denoise`` adds noise. Before that, ``deblur`` applies a Gaussian blur, and ``super_resolve`` shrinks and
            enlarges by bicubic interpolation.
        sigma: spread of the white noise, out of 255; None = 25, 2 and 0 for the three tasks.
        blur_sigma: spread of the blur in pixels.
        scale: factor by which the image is shrunk.
        is_grey: whether all colours get the same noise.

    Raises:
        ConfigError: see `rules`.
    """

    def __init__(
        self,
        task: str = "denoise",
        sigma: float | None = None,
        blur_sigma: float = 1.6,
        scale: int = 2,
        *,
        is_grey: bool = False,
    ) -> None:
        ConfigError.check("workload.data", *rules(task, sigma, blur_sigma, scale))
        self.task = task
        self.sigma = USUAL_SIGMA[task] if sigma is None else float(sigma)
        self.blur_sigma, self.scale, self.is_grey = float(blur_sigma), int(scale), is_grey
        self._banks: dict[tuple[str, int], Tensor] = {}

    def __call__(self, clean_BCHW: Tensor, key_B: Tensor, rng: SampleRng) -> Tensor:
        """Degrades clean images in 0..1 to float32 [B, C, H, W]; unclipped, since sensor noise is symmetrical.

        The noise is a function of the rng's (seed, epoch) and of ``key_B`` (int64 [B], such as the samples' indices).
        """
        degraded_BCHW = self.without_noise(clean_BCHW)
        if self.sigma == 0:
            return degraded_BCHW
        batch, channels, height, width = clean_BCHW.shape
        size = (1 if self.is_grey else channels) * height * width
        bank_N = self._bank(size, clean_BCHW.device)
        num_places = len(bank_N) - size + 1
        cut_NM = bank_N.as_strided((num_places, size), (1, 1))
        noise_BM = cut_NM.index_select(0, rng.randint_at(key_B, num_places, PLACE_DRAW))
        noise_BCHW = noise_BM.view(batch, -1, height, width).expand(clean_BCHW.shape)
        sign_B = 1 - 2 * rng.randint_at(key_B, 2, SIGN_DRAW)
        return torch.addcmul(degraded_BCHW, noise_BCHW, (sign_B * (self.sigma / 255)).float().view(-1, 1, 1, 1))

    def for_evaluation(self, image_CHW: Tensor, image_index: int) -> Tensor:
        """Degrades a uint8 image of any size to float32 [C, H, W]; the noise depends only on ``image_index``."""
        degraded_CHW = self.without_noise(image_CHW.float().div(255).unsqueeze(0)).squeeze(0)
        generator = torch.Generator().manual_seed(seed_from(NOISE_SEED, image_index))
        shape = (1, *image_CHW.shape[1:]) if self.is_grey else image_CHW.shape
        return degraded_CHW + torch.randn(shape, generator=generator) * (self.sigma / 255)

    def without_noise(self, clean_BCHW: Tensor) -> Tensor:
        """Returns blurred or coarse images, depending on ``task``; with ``denoise`` the same images."""
        if self.task == "deblur":
            return blur(clean_BCHW, self.blur_sigma)
        return shrink_and_enlarge(clean_BCHW, self.scale) if self.task == "super_resolve" else clean_BCHW

    def _bank(self, numbers: int, device: torch.device) -> Tensor:
        """Returns the bank of normal numbers for images of this size; equal on all devices."""
        length = max(BANK_NUMBERS, 4 * numbers)
        bank_N = self._banks.get((str(device), length))
        if bank_N is None:
            bank_N = torch.randn(length, generator=torch.Generator().manual_seed(NOISE_SEED)).to(device)
            self._banks[str(device), length] = bank_N
        return bank_N

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_banks": {}}


def blur(image_BCHW: Tensor, sigma: float) -> Tensor:
    """Convolves with a Gaussian of spread ``sigma`` pixels; edges of images larger than 3 sigma are reflected."""
    reach = blur_reach(sigma)
    weight_K = gaussian_window(reach, sigma).to(image_BCHW)
    channels = image_BCHW.shape[1]
    padded = functional.pad(image_BCHW, (reach, reach, reach, reach), mode="reflect")
    down = functional.conv2d(padded, weight_K.view(1, 1, -1, 1).expand(channels, 1, -1, 1), groups=channels)
    return functional.conv2d(down, weight_K.view(1, 1, 1, -1).expand(channels, 1, 1, -1), groups=channels)


def blur_reach(sigma: float) -> int:
    """Returns the reach of `blur` in pixels to each side; an image must be larger."""
    return math.ceil(3 * sigma)


def gaussian_window(reach: int, sigma: float) -> Tensor:
    """Returns weights at -reach..reach that sum to 1, float32 [2 reach + 1]."""
    place_K = torch.arange(-reach, reach + 1, dtype=torch.float64)
    weight_K = torch.exp(-0.5 * (place_K / sigma) ** 2)
    return (weight_K / weight_K.sum()).float()


def shrink_and_enlarge(image_BCHW: Tensor, scale: int) -> Tensor:
    """Shrinks to 1 / scale of the size (each pixel is a mean) and enlarges again, both bicubic; edges are reflected."""
    height, width = image_BCHW.shape[-2:]
    padded = functional.pad(image_BCHW, (0, -width % scale, 0, -height % scale), mode="reflect")
    small_size = (padded.shape[-2] // scale, padded.shape[-1] // scale)
    small = functional.interpolate(padded, size=small_size, mode="bicubic", antialias=True)
    large = functional.interpolate(small, size=padded.shape[-2:], mode="bicubic")
    return large[..., :height, :width]


def rules(task: str, sigma: float | None, blur_sigma: float, scale: int) -> list[Rule]:
    """Returns the rules for the arguments of `Degradation`, for `ConfigError.check`."""
    has_sigma = sigma is None or 0 <= sigma <= 255
    return [
        ("task", task, task in TASKS, f"is none of {', '.join(TASKS)}", "task=denoise"),
        ("sigma", sigma, has_sigma, "is not in 0..255", "sigma=25, or null"),
        ("sigma", sigma, task != "denoise" or sigma != 0, "leaves nothing to remove with task=denoise", "sigma=25"),
        ("blur_sigma", blur_sigma, 0.1 <= blur_sigma <= 10, "is not in 0.1..10 pixels", "blur_sigma=1.6"),
        ("scale", scale, 2 <= scale <= 8 and scale == int(scale), "is no whole number in 2..8", "scale=2"),
    ]
