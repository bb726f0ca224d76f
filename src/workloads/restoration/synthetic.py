"""Draws images of overlapping leaves, from which a model learns edges and textures without photographs.

Leaves are ellipses and polygons whose sizes follow a power law. Such images have the statistics of natural ones at all
scales (Lee, Mumford, Huang, Occlusion Models for Natural Images, IJCV 41, 2001). Denoisers trained on them also work on
photographs (Achddou, Gousseau, Ladjal, Synthetic Images as a Regularity Prior for Image Restoration Neural Networks,
2021, https://openreview.net/forum?id=vKT8fZFGcG).

Shapes: N images of a group, K leaves, L = N K, S side of an image, F = 2 S side of the grid that edges are drawn on, T
textures.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from wellfed import ConfigError

GROUP = 24
"""Number of images drawn at once. Their leaves share shapes, but not positions and colours."""
SMALLEST_SIDE = 16
RADII_PX = (3.0, 100.0)
"""Radii of the smallest and the largest leaf in pixels. The density falls with the third power, so each scale covers an
equal area."""
SMALLEST_PX = (3.0, 24.0)
"""Range of the smallest radius, drawn for each image, since photographs have smooth areas."""
COVERS = 4.0
"""Area of all leaves over the area of the image, before some are left out; exp(-4) of the ground is visible."""
NUM_TEXTURES = 12

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


def dead_leaves(num_images: int, size: int, seed: int) -> list[Bytes]:
    """Draws uint8 images ``[size, size, 3]`` with matching opposite edges; equal seeds give equal images.

    Raises:
        ConfigError: no images, or a ``size`` below 16.
    """
    ConfigError.check(
        "workload.data",
        ("num_images", num_images, num_images >= 1, "is below 1", "num_images=24 or so"),
        ("size", size, size >= SMALLEST_SIDE, f"is below {SMALLEST_SIDE} pixels", "256 or so"),
    )
    images: list[Bytes] = []
    for start in range(0, num_images, GROUP):
        rng = np.random.default_rng([seed, start])
        images += list(_group(rng, min(GROUP, num_images - start), size))
    return images


def _group(rng: np.random.Generator, num_images: int, size: int) -> Bytes:
    """Draws images [N, S, S, 3]."""
    radius_K = _radii(rng, size)
    centre_NK2 = rng.integers(2 * size, size=(num_images, len(radius_K), 2))
    top_NFF = _top_leaf(rng, radius_K, centre_NK2, 2 * size)
    top_NFF += (np.arange(num_images, dtype=np.int32) * len(radius_K))[:, None, None]  # rows of tables [N K, ...]
    colour_L3 = _colours(rng, num_images, len(radius_K)).reshape(-1, 3)
    image_NSS3 = sum(colour_L3[top_NFF[:, row::2, column::2]] for row in (0, 1) for column in (0, 1)) / np.float32(4)
    image_NSS3 += _relief(rng, top_NFF[:, ::2, ::2], radius_K, centre_NK2 // 2)[..., None]
    return np.clip(np.rint(_blurred(rng, image_NSS3) * 255), 0, 255).astype(np.uint8)


def _radii(rng: np.random.Generator, size: int) -> Floats:
    """Draws radii on the finer grid, [K], enough to cover the image."""
    low, high = 2 * RADII_PX[0], 2 * min(RADII_PX[1], size / 3)
    mean_area = 2 * np.pi * low**2 * np.log(high / low) / (1 - (low / high) ** 2)
    count = int(COVERS * (2 * size) ** 2 / mean_area) + 1
    share_K = rng.random(count)
    return (low / np.sqrt(1 - share_K * (1 - (low / high) ** 2))).astype(np.float32)


def _top_leaf(rng: np.random.Generator, radius_K: Floats, centre_NK2: Ints, side: int) -> NDArray[np.int32]:
    """Returns the number of the visible leaf, [N, F, F]. Later leaves hide earlier ones; the first is the ground."""
    num_images = len(centre_NK2)
    top_NFF = np.zeros((num_images, side, side), np.int32)
    start_N1 = (np.arange(num_images) * side * side)[:, None]
    smallest_N = 2 * np.exp(rng.uniform(math.log(SMALLEST_PX[0]), math.log(SMALLEST_PX[1]), num_images))
    for number, radius in enumerate(radius_K):
        images = np.flatnonzero(radius >= smallest_N)
        row_M, column_M = _leaf(rng, float(radius))
        row_NM = (centre_NK2[images, number, :1] + row_M) % side
        column_NM = (centre_NK2[images, number, 1:] + column_M) % side
        top_NFF.reshape(-1)[start_N1[images] + row_NM * side + column_NM] = number
    return top_NFF


def _leaf(rng: np.random.Generator, radius: float) -> tuple[Ints, Ints]:
    """Draws a leaf: its rows and columns relative to its centre, [M] each."""
    reach = int(radius) + 1
    grid = np.arange(-reach, reach + 1)
    angle = rng.random() * np.pi
    along = (np.cos(angle) * grid[:, None] + np.sin(angle) * grid) / radius
    across = (np.cos(angle) * grid - np.sin(angle) * grid[:, None]) / radius
    across /= rng.uniform(0.15, 1.0)
    if rng.random() < 0.5:
        inside = along**2 + across**2 <= 1
    else:
        sides = np.sort(rng.random(rng.integers(3, 7))) * 2 * np.pi
        inside = along**2 + across**2 <= 1
        for direction in sides:
            inside &= np.cos(direction) * along + np.sin(direction) * across <= 0.6
    row_M, column_M = np.nonzero(inside)
    return row_M - reach, column_M - reach


def _colours(rng: np.random.Generator, num_images: int, num_leaves: int) -> Floats:
    """Draws RGB in about 0..1, [N, K, 3]: wide in brightness, narrow in colour, as in photographs."""
    mean_N1, contrast_N1 = rng.uniform(0.3, 0.6, (num_images, 1)), rng.uniform(0.1, 0.3, (num_images, 1))
    light_NK = mean_N1 + contrast_N1 * rng.normal(size=(num_images, num_leaves))
    cast_N12 = rng.normal(scale=0.04, size=(num_images, 1, 2))
    tint_NK2 = cast_N12 + rng.laplace(scale=0.035, size=(num_images, num_leaves, 2))
    tint_NK3 = tint_NK2 @ np.array([[1.0, 0.0, -1.0], [0.4, -0.8, 0.4]])
    colour_NK3: Floats = np.clip(light_NK[..., None] + tint_NK3, 0.02, 0.98).astype(np.float32)
    return colour_NK3


def _relief(rng: np.random.Generator, top_NSS: NDArray[np.int32], radius_K: Floats, centre_NK2: Ints) -> Floats:
    """Returns offsets of the leaves' colours, [N, S, S]: a slope of brightness over each leaf, and its texture."""
    num_images, size = top_NSS.shape[:2]
    count = num_images * len(radius_K)
    texture_TSS = _textures(rng, size)
    slope_L2 = rng.laplace(scale=0.12, size=(count, 2)).astype(np.float32) / np.tile(radius_K, num_images)[:, None]
    strength_L = rng.exponential(0.05, count).astype(np.float32) * (rng.random(count) < 0.7)
    offset_L = rng.integers(NUM_TEXTURES * size * size, size=count)
    place = np.arange(size)
    relief_NSS = np.zeros(top_NSS.shape, np.float32)
    for axis, along in enumerate((place[:, None], place)):
        distance_NSS = (along - centre_NK2.reshape(-1, 2)[:, axis][top_NSS] + size // 2) % size - size // 2
        relief_NSS += slope_L2[:, axis][top_NSS] * distance_NSS
    np.clip(relief_NSS, -0.25, 0.25, out=relief_NSS)
    seen = (offset_L[top_NSS] + place[:, None] * size + place) % texture_TSS.size
    relief_NSS += strength_L[top_NSS] * texture_TSS.reshape(-1)[seen]
    return relief_NSS


def _textures(rng: np.random.Generator, size: int) -> Floats:
    """Draws textures of mean 0 and spread 1, [T, S, S]: noise from white to cloudy, stretched in a direction; and
    stripes."""
    frequency_x, frequency_y = np.fft.rfftfreq(size), np.fft.fftfreq(size)[:, None]
    textures = []
    for number in range(NUM_TEXTURES):
        angle, stretch = rng.random() * np.pi, rng.uniform(1, 6)
        along = np.cos(angle) * frequency_x + np.sin(angle) * frequency_y
        across = (np.cos(angle) * frequency_y - np.sin(angle) * frequency_x) * stretch
        if number % 3 == 2:  # stripes: a narrow ring of frequencies on one side
            wave = rng.uniform(0.04, 0.3)
            amplitude = np.exp(-(((np.abs(along) - wave) / 0.015) ** 2) - (across / 0.06) ** 2)
        else:
            amplitude = (along**2 + across**2 + 1e-3) ** (-rng.uniform(0.0, 0.9))
        amplitude[0, 0] = 0
        phases = np.exp(2j * np.pi * rng.random(amplitude.shape))
        texture_SS = np.fft.irfft2(amplitude * phases, (size, size))
        textures.append((texture_SS / texture_SS.std()).astype(np.float32))
    return np.stack(textures)


def _blurred(rng: np.random.Generator, image_NSS3: Floats) -> Floats:
    """Blurs the images like lenses of different quality."""
    side_N111 = rng.uniform(0.0, 0.2, (len(image_NSS3), 1, 1, 1)).astype(np.float32)
    for axis in (1, 2):
        beside = np.roll(image_NSS3, 1, axis) + np.roll(image_NSS3, -1, axis)
        image_NSS3 = image_NSS3 + side_N111 * (beside - 2 * image_NSS3)
    return image_NSS3
