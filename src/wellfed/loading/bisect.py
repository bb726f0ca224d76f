"""Which samples make a batch fail, when all that can be asked is whether a part of it fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

Trouble = TypeVar("Trouble")


class Innocent(Exception):
    """Every sample can be had alone: what failed was the batch, or it was a mood."""


def culprits(
    indices: Tensor, known: Trouble, trouble: Callable[[Tensor], Trouble | None], *, most: int
) -> list[tuple[int, Trouble]]:
    """The first ``most`` indices that fail, in the order of ``indices``, each with its trouble.

    One culprit among n costs about log2(n) questions.

    Args:
        known: the trouble of all of them together.
        trouble: what a part fails with; None = it does not.

    Raises:
        Innocent: a part fails and neither of its halves does.
    """
    if len(indices) == 1:
        return [(int(indices[0]), known)]
    middle = len(indices) // 2
    found: list[tuple[int, Trouble]] = []
    for half in (indices[:middle], indices[middle:]):
        if len(found) < most and (of_half := trouble(half)) is not None:
            found += culprits(half, of_half, trouble, most=most - len(found))
    if not found:
        raise Innocent
    return found
