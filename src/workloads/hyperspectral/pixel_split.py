"""Splits the labelled pixels of a scene into training, validation and test, by blocks of ground or at random.

Shapes: H height, W width, K classes, M cells, N labelled pixels, S = 3 parts.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

SplitName = Literal["blocks", "random"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)
TRAIN, VAL, TEST, NONE = 0, 1, 2, -1
LARGEST_SHARE = 1 / 5
"""Maximum share of a class in one cell; larger cells are quartered, so that each class lies in several. Below a fifth,
most test pixels would lie next to training pixels. Above it, validation lacks some classes."""
_SWEEPS = 10
_LACKING = 100.0
"""Cost of a class without training or test pixels, in squares of shares."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def split_blocks(class_HW: Ints, shares: tuple[float, float, float], block_size: int, rng: np.random.Generator) -> Ints:
    """Returns the part of each labelled pixel [H, W], else `NONE`. All pixels of a square belong to one part.

    Squares have sides of ``block_size``, or less if a class would lie in too few of them. Their parts are drawn, then
    changed one by one until each class has about its ``shares`` in train, val and test. A class that is still only in
    train or only in test is divided from top to bottom, across squares.
    """
    row_N, column_N = np.nonzero(class_HW >= 0)
    class_N = class_HW[row_N, column_N]
    cell_N = _cells(row_N, column_N, class_N, block_size)
    count_MK = np.zeros((cell_N.max() + 1, class_N.max() + 1))
    np.add.at(count_MK, (cell_N, class_N), 1)
    part_HW = np.full(class_HW.shape, NONE)
    part_N = _assigned(count_MK, np.array(shares), rng)[cell_N]
    for each in range(class_N.max() + 1):
        place = np.flatnonzero(class_N == each)
        if len({TRAIN, TEST}.intersection(part_N[place])) < 2:  # a small class among others
            part_N[place] = TEST
            part_N[place[: max(1, int(shares[TRAIN] * len(place)))]] = TRAIN
    part_HW[row_N, column_N] = part_N
    return part_HW


def _cells(row_N: Ints, column_N: Ints, class_N: Ints, block_size: int) -> Ints:
    """Returns the number of each pixel's square."""
    total_K = np.bincount(class_N)
    side_N = np.full(len(row_N), block_size)
    while True:
        key_N4 = np.stack([row_N // side_N, column_N // side_N, side_N, class_N], 1)
        _, group_N, count_G = np.unique(key_N4, axis=0, return_inverse=True, return_counts=True)
        group_N = group_N.reshape(-1)
        is_large_N = (count_G[group_N] > np.maximum(1, LARGEST_SHARE * total_K[class_N])) & (side_N > 1)
        _, cell_N = np.unique(key_N4[:, :3], axis=0, return_inverse=True)
        cell_N = cell_N.reshape(-1)
        if not is_large_N.any():
            return cell_N
        is_quartered_M = np.zeros(cell_N.max() + 1, dtype=bool)
        is_quartered_M[cell_N[is_large_N]] = True
        side_N = np.where(is_quartered_M[cell_N], (side_N + 1) // 2, side_N)


def _assigned(count_MK: Floats, share_S: Floats, rng: np.random.Generator) -> Ints:
    """Returns the part of each cell [M]."""
    num_cells = len(count_MK)
    portion_MK = count_MK / count_MK.sum(0)
    part_M = rng.choice(3, size=num_cells, p=share_S)
    have_SK = np.stack([portion_MK[part_M == part].sum(0) for part in range(3)])
    for _ in range(_SWEEPS):
        before = part_M.copy()
        for cell in rng.permutation(num_cells):
            have_SK[part_M[cell]] -= portion_MK[cell]
            costs = [_cost(have_SK, portion_MK[cell], part, share_S) for part in range(3)]
            part_M[cell] = int(np.argmin(costs))
            have_SK[part_M[cell]] += portion_MK[cell]
        if (before == part_M).all():
            break
    return part_M


def _cost(have_SK: Floats, portion_K: Floats, part: int, share_S: Floats) -> float:
    """Returns the distance of the classes of a cell from their shares if it joins a part; infinite if the part has no
    share."""
    if share_S[part] == 0:
        return np.inf
    seen_K = portion_K > 0
    share_SK = have_SK[:, seen_K].copy()
    share_SK[part] += portion_K[seen_K]
    lacking = (share_SK[[TRAIN, TEST]] < 1e-9).sum()
    return float(((share_SK - share_S[:, None]) ** 2).sum() + _LACKING * lacking)


def split_random(class_HW: Ints, shares: tuple[float, float, float], rng: np.random.Generator) -> Ints:
    """Returns the part of each labelled pixel [H, W]; pixels of each class are drawn one by one."""
    part_HW = np.full(class_HW.shape, NONE)
    for each in range(class_HW.max() + 1):
        place = rng.permutation(np.flatnonzero(class_HW == each))
        num_train = min(max(1, round(shares[TRAIN] * len(place))), len(place) - 1)
        num_val = min(round(shares[VAL] * len(place)), len(place) - 1 - num_train)
        part_HW.flat[place] = TEST
        part_HW.flat[place[:num_train]] = TRAIN
        part_HW.flat[place[num_train : num_train + num_val]] = VAL
    return part_HW


def keep_apart(class_HW: Ints, part_HW: Ints, radius: int) -> tuple[Ints, int, dict[int, list[int]]]:
    """Removes pixels of validation and test that lie in a patch around a training pixel.

    Returns:
        The parts, the number of removed pixels, and the classes kept because `VAL` or `TEST` would lose all pixels.
    """
    near_HW = _dilated(part_HW == TRAIN, radius)
    kept_HW, num_left_out = part_HW.copy(), 0
    too_close: dict[int, list[int]] = {VAL: [], TEST: []}
    for each in range(class_HW.max() + 1):
        for part in (VAL, TEST):
            held_out = (class_HW == each) & (part_HW == part)
            if not (held_out & ~near_HW).any():
                if held_out.any():
                    too_close[part].append(each)
                continue
            kept_HW[held_out & near_HW] = NONE
            num_left_out += int((held_out & near_HW).sum())
    return kept_HW, num_left_out, too_close


def _dilated(mask_HW: NDArray[np.bool_], radius: int) -> NDArray[np.bool_]:
    """Returns True within ``radius`` rows and columns of each True pixel."""
    for axis in (0, 1):
        widened = mask_HW.copy()
        for step in range(1, radius + 1):
            ahead, behind = np.roll(mask_HW, step, axis), np.roll(mask_HW, -step, axis)
            np.moveaxis(ahead, axis, 0)[:step] = False
            np.moveaxis(behind, axis, 0)[-step:] = False
            widened |= ahead | behind
        mask_HW = widened
    return mask_HW
