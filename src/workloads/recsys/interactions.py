"""Holds interactions of users with items as arrays, and splits them by time. All readers return them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wellfed import DataError
from wellfed.units import counted, show_count

Ints = NDArray[np.int64]

MIN_EVALUATED = 3
"""Minimum number of interactions of an evaluated user: one each for training, validation and test."""


@dataclass(frozen=True)
class Interactions:
    """Ratings in file order with the metadata of their users and items."""

    users: Ints
    """Row of the user, 0..U-1, [N]."""
    items: Ints
    """Row of the item, 0..I-1, [N]."""
    ratings: NDArray[np.float64] | Ints | None
    """Ratings [N], 1 to 5 stars in MovieLens; None = no ratings."""
    times: Ints
    """Seconds since 1970; only the order is used."""
    user_texts: list[str]
    """A sentence for each of U users."""
    item_texts: list[str]
    """A sentence for each of I items."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class LeaveLastOut:
    """Split by time: the last interaction of a user is the test item, the one before it the validation item."""

    users: Ints
    """Training pairs, sorted by user, then time."""
    items: Ints
    evaluated_users: Ints
    """Users with a validation and a test item, ascending."""
    val_items: Ints
    """Validation item of each evaluated user."""
    test_items: Ints
    notes: tuple[str, ...]


def leave_last_out(interactions: Interactions, min_rating: float | None) -> LeaveLastOut:
    """Splits by time; equal times keep their order in the file.

    A repeated pair counts once, at its latest time. Users with fewer than three interactions are only in training.

    Raises:
        DataError: no user has three interactions.
    """
    notes = []
    chosen = np.arange(len(interactions.users))
    if min_rating is not None and interactions.ratings is not None:
        chosen = chosen[interactions.ratings >= min_rating]
        notes.append(
            f"{show_count(len(chosen))} of {show_count(len(interactions.users))} ratings are >= {min_rating:g}"
        )
    chosen = chosen[np.lexsort((chosen, interactions.times[chosen], interactions.users[chosen]))]
    latest = _last_of_each_pair(interactions, chosen)
    if len(latest) < len(chosen):
        notes.append(f"{counted(len(chosen) - len(latest), 'repeated (user, item) pair')}: the latest of each is kept")
    user_N, item_N = interactions.users[latest], interactions.items[latest]

    count_U = np.bincount(user_N, minlength=len(interactions.user_texts))
    evaluated_E = np.flatnonzero(count_U >= MIN_EVALUATED)
    if len(evaluated_E) == 0:
        rule = f"no user has {MIN_EVALUATED} interactions ({counted(len(user_N), 'interaction')} in all)"
        lower = "" if min_rating is None else f", or lower workload.data.min_rating={min_rating}"
        raise DataError(f"{rule}, so nobody can be evaluated. Point workload.data.path at a larger set{lower}.")
    few = int(((count_U > 0) & (count_U < MIN_EVALUATED)).sum())
    if few:
        notes.append(f"{counted(few, 'user')} with fewer than {MIN_EVALUATED} interactions: trained on, not evaluated")

    end_E = np.cumsum(count_U)[evaluated_E]
    held_out = np.zeros(len(user_N), dtype=bool)
    held_out[end_E - 1] = held_out[end_E - 2] = True
    return LeaveLastOut(
        users=user_N[~held_out],
        items=item_N[~held_out],
        evaluated_users=evaluated_E,
        val_items=item_N[end_E - 2],
        test_items=item_N[end_E - 1],
        notes=tuple(notes),
    )


def _last_of_each_pair(interactions: Interactions, ordered: Ints) -> Ints:
    """Returns the entries of ``ordered`` (by user, then time) that are not repeated later, in the same order."""
    pair = interactions.users[ordered] * len(interactions.item_texts) + interactions.items[ordered]
    _, first_from_end = np.unique(pair[::-1], return_index=True)
    last: Ints = ordered[np.sort(len(ordered) - 1 - first_from_end)]
    return last
