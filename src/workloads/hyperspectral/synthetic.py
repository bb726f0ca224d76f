"""Draws a scene of fields with spectra of soil and plants mixed in patterns.

The scene is hard for the same reasons as real ones. Mean spectra of some classes are nearly equal; they differ in the
arrangement of plants and soil (rows, tussocks, an even cover). Fields of one class differ in light, moisture and cover.
Pixels at edges are mixed, and some bands are mostly noise.

Shapes: H height, W width, C bands, K classes, F fields, N curves of B bumps.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wellfed import ConfigError

WAVELENGTHS_UM = (0.4, 2.5)
WATER_UM = (1.38, 1.87)
"""Wavelengths in micrometres at which water in the air absorbs most light."""
PATTERNS = ("even", "rows", "tussocks")
NUM_BUMPS = 8
KIND_SPREAD, FIELD_SPREAD = 0.08, 0.008
"""Relative spread of reflectance between two kinds of plants, and between fields of one class."""
FIELD_PX = 13
"""Side in pixels of a square with the area of an average field."""
NOISE = 0.02

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def field_scene(size: int, num_bands: int, num_classes: int, seed: int) -> tuple[NDArray[np.uint16], NDArray[np.int32]]:
    """Draws a cube [H, W, C] of reflectance times 10,000, and its ground truth [H, W], 0 for background.

    Raises:
        ConfigError: a size is out of range.
    """
    ranges = {"size": (size, 32, 512), "num_bands": (num_bands, 8, 1000), "num_classes": (num_classes, 2, 50)}
    ConfigError.check(
        "workload.data",
        *(
            (name, value, low <= value <= high, f"is not in {low}..{high}", f"{name}={2 * low}")
            for name, (value, low, high) in ranges.items()
        ),
    )
    rng = np.random.default_rng([seed, size, num_bands, num_classes])
    field_HW, border_HW = _fields(rng, size)
    num_fields = int(field_HW.max()) + 1
    class_F = _classes(rng, num_fields, num_classes)
    cover_HW = np.zeros((size, size))
    for number in range(num_fields):
        inside = field_HW == number
        cover_HW[inside] = _cover(rng, int(class_F[number]), size)[inside]
    soil_FC, plant_FC = _spectra(rng, class_F, num_bands)
    light_F11 = rng.normal(1, 0.02, num_fields)[:, None]
    cover_HW1 = np.clip(cover_HW, 0, 1)[..., None]
    cube_HWC = (1 - cover_HW1) * (light_F11 * soil_FC)[field_HW] + cover_HW1 * (light_F11 * plant_FC)[field_HW]
    cube_HWC = _blurred(cube_HWC)
    cube_HWC += rng.normal(size=cube_HWC.shape) * _noise(rng, num_bands)
    labels_HW = class_F[field_HW] + 1
    labels_HW[border_HW | (rng.random(num_fields) < 0.1)[field_HW]] = 0
    return np.clip(np.rint(cube_HWC * 10_000), 0, 65_535).astype(np.uint16), labels_HW.astype(np.int32)


def _fields(rng: np.random.Generator, size: int) -> tuple[Ints, NDArray[np.bool_]]:
    """Returns the field of each pixel, and whether it lies at a border. Fields are the cells of random points."""
    num_fields = max(8, round((size / FIELD_PX) ** 2))
    centre_F2 = rng.random((num_fields, 2)) * size
    field_HW, border_HW = np.empty((size, size), np.int64), np.empty((size, size), bool)
    for row in range(size):  # all rows at once would take gigabytes
        distance_FW = np.hypot(row - centre_F2[:, :1], np.arange(size) - centre_F2[:, 1:])
        nearest = np.partition(distance_FW, 1, axis=0)
        field_HW[row], border_HW[row] = distance_FW.argmin(0), nearest[1] - nearest[0] < 1.5
    return field_HW, border_HW


def _classes(rng: np.random.Generator, num_fields: int, num_classes: int) -> Ints:
    """Draws the class of each field. Every class has fields, some more than others."""
    weight_K = np.linspace(1, 0.35, num_classes)
    own = np.arange(num_classes).repeat(2)[:num_fields]
    more = rng.choice(num_classes, size=num_fields - len(own), p=weight_K / weight_K.sum())
    found: Ints = rng.permutation(np.concatenate([own, more]))
    return found


def _cover(rng: np.random.Generator, number: int, size: int) -> Floats:
    """Draws the share of plants over a field [H, W]; the mean depends on the field, the pattern on the class."""
    row, column = np.mgrid[:size, :size]
    mean = float(rng.normal(0.5, 0.03))
    rough: Floats = rng.normal(size=(size, size))
    cover: Floats = mean + 0.05 * rough
    pattern = PATTERNS[number % len(PATTERNS)]
    if pattern == "rows":
        angle = rng.random() * np.pi
        wave = np.cos(angle) * row + np.sin(angle) * column
        cover += 0.3 * np.sin(2 * np.pi * wave / 3.3)
    elif pattern == "tussocks":
        for _ in range(2):
            rough = _blurred(rough[..., None])[..., 0]
        cover = mean + 0.25 * rough / rough.std()
    return cover


def _spectra(rng: np.random.Generator, class_F: Ints, num_bands: int) -> tuple[Floats, Floats]:
    """Draws the reflectance of soil and plants in each field, [F, C]; kinds of classes have different plants."""
    wave_C = np.linspace(*WAVELENGTHS_UM, num_bands)
    soil_C = 0.12 + 0.2 * (1 - np.exp(-(wave_C - 0.35) / 0.7)) - 0.05 * _band(wave_C, 2.2, 0.06)
    edge_C = 1 / (1 + np.exp(-(wave_C - 0.715) / 0.018))
    drop_C = 1 - 0.5 * (_band(wave_C, 1.45, 0.07) + _band(wave_C, 1.94, 0.09))
    plant_C = 0.05 + 0.05 * _band(wave_C, 0.55, 0.04) + 0.45 * edge_C * drop_C * np.exp(-0.45 * (wave_C - 0.9).clip(0))
    kind_F = class_F // len(PATTERNS)
    own_KC = _bumps(np.random.default_rng(7), int(kind_F.max()) + 1, wave_C)
    soil_FC = soil_C * (1 + FIELD_SPREAD * _bumps(rng, len(class_F), wave_C))
    plant_FC = plant_C * (1 + KIND_SPREAD * own_KC[kind_F] + FIELD_SPREAD * _bumps(rng, len(class_F), wave_C))
    return soil_FC, plant_FC


def _bumps(rng: np.random.Generator, count: int, wave_C: Floats) -> Floats:
    """Draws smooth curves with mean 0 and a spread of about 1."""
    shape = (count, NUM_BUMPS, 1)
    centre_NB1, width_NB1 = rng.uniform(*WAVELENGTHS_UM, shape), rng.uniform(0.05, 0.4, shape)
    curve_NC: Floats = (rng.normal(size=shape) * _band(wave_C, centre_NB1, width_NB1)).sum(1)
    return curve_NC


def _noise(rng: np.random.Generator, num_bands: int) -> Floats:
    """Returns the spread of the noise in each band; ten times as large in water bands."""
    wave_C = np.linspace(*WAVELENGTHS_UM, num_bands)
    dark_C = sum(_band(wave_C, centre, 0.035) for centre in WATER_UM)
    return NOISE * rng.uniform(0.6, 1.4, num_bands) * (1 + 9 * dark_C)


def _band(wave_C: Floats, centre: float | Floats, width: float | Floats) -> Floats:
    found: Floats = np.exp(-0.5 * ((wave_C - centre) / width) ** 2)
    return found


def _blurred(image_HWC: Floats) -> Floats:
    """Blurs the image: each pixel gets some light from its neighbours."""
    for axis in (0, 1):
        beside = np.roll(image_HWC, 1, axis) + np.roll(image_HWC, -1, axis)
        image_HWC = 0.7 * image_HWC + 0.15 * beside
    return image_HWC
