"""Makes the recommender's data of a MovieLens folder or the embedded set: triplets to train on, users to rank for."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from wellfed.contract import Datasets
from wellfed.errors import ConfigError, Fault
from wellfed.units import counted
from workloads.recsys.evaluation import RankedUsers, Ranking
from workloads.recsys.interactions import Interactions, leave_last_out
from workloads.recsys.movielens import read_movielens
from workloads.recsys.synthetic import synthetic_interactions
from workloads.recsys.triplets import TripletData


def datasets(
    path: str | None = None,
    scale: float = 0.1,
    seed: int = 0,
    *,
    min_rating: int | None = None,
    avoid_held_out: bool = False,
    max_bad_lines: int = 100,
) -> Datasets:
    """Training triplets, and one row per evaluated user for validation and test.

    Args:
        path: folder with MovieLens-1M or -100K files; None = the embedded set.
        scale: size of the embedded set as a share of a million ratings.
        seed: of the embedded set; not of the training.
        min_rating: stars from which a rating counts as an interaction; None = every rating.
        avoid_held_out: never draw a user's validation or test item as a negative either. That tells the model which
            items are held out (all others are pushed down): for comparison with code that does so, not for figures.
        max_bad_lines: unreadable lines to skip. 100 is 0.1 % of the smaller set: a few damaged lines should not cost
            an evening, a wrong format should stop at once.

    Raises:
        DataError: files missing, unreadable, with too many bad lines, or with nobody to evaluate.
        ConfigError: an argument out of its range.
    """
    _check(scale, min_rating, max_bad_lines)
    interactions = synthetic_interactions(scale, seed) if path is None else read_movielens(Path(path), max_bad_lines)
    return build(interactions, min_rating, avoid_held_out)


def build(interactions: Interactions, min_rating: int | None = None, avoid_held_out: bool = False) -> Datasets:
    """Split and wrap interactions of any source."""
    split = leave_last_out(interactions, min_rating)
    num_users, num_items = len(interactions.user_texts), len(interactions.item_texts)
    evaluated_E = split.evaluated_users
    train = TripletData(
        split.users,
        split.items,
        num_users=num_users,
        num_items=num_items,
        avoid=(
            np.concatenate([split.users, evaluated_E, evaluated_E]),
            np.concatenate([split.items, split.val_items, split.test_items]),
        )
        if avoid_held_out
        else None,
    )
    seen_before_test = (
        np.concatenate([split.users, evaluated_E]),
        np.concatenate([split.items, split.val_items]),
    )
    size = (
        f"{counted(num_users, 'user')}, {counted(num_items, 'item')}, {counted(len(train), 'training interaction')}, "
        f"{counted(len(evaluated_E), 'user')} evaluated"
    )
    return Datasets(
        train=train,
        val=RankedUsers("val", evaluated_E, split.val_items, seen=(split.users, split.items), num_users=num_users),
        test=RankedUsers("test", evaluated_E, split.test_items, seen=seen_before_test, num_users=num_users),
        evaluation=Ranking(num_users, num_items),
        model_args={
            "num_users": num_users,
            "num_items": num_items,
            "texts": [*interactions.user_texts, *interactions.item_texts],
        },
        notes=(size, *interactions.notes, *split.notes, *train.notes),
    )


def _check(scale: float, min_rating: int | None, max_bad_lines: int) -> None:
    faults = []
    if not 0 < scale <= 4:
        faults.append(Fault("workload.data.scale", f"{scale} is not in (0, 4].", "Write scale=0.1 or so."))
    if min_rating is not None and not 1 <= min_rating <= 5:
        faults.append(Fault("workload.data.min_rating", f"{min_rating} is not in 1..5.", "Write min_rating=null or 4."))
    if max_bad_lines < 0:
        faults.append(Fault("workload.data.max_bad_lines", f"{max_bad_lines} is negative.", "Write 0 to allow none."))
    if faults:
        raise ConfigError(faults)
