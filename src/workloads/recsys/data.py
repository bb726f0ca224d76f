"""Builds the recommender's data from MovieLens, a table or the embedded set: training triplets, users to rank."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from wellfed import ConfigError, Datasets, Fault
from wellfed.units import counted
from workloads.recsys.evaluation import RankedUsers, Ranking
from workloads.recsys.interactions import Interactions, LeaveLastOut, leave_last_out
from workloads.recsys.model import USUAL_L2, text_of
from workloads.recsys.movielens import read_movielens
from workloads.recsys.synthetic import synthetic_interactions
from workloads.recsys.triplets import TripletData

FULL_EPOCH = 200_000
"""Passes per epoch are the square root of this number over the interactions; chosen by validation on real sets."""
FEW_PER_USER, MORE_L2, MOST_L2 = 20, 1.5, 0.05
"""Regularisation grows below this number of training interactions per user; exponent of the growth; maximum weight."""


def datasets(
    path: str | None = None,
    scale: float = 0.1,
    seed: int = 0,
    *,
    min_rating: float | None = None,
    passes: int | None = None,
    avoid_held_out: bool = False,
    max_bad_lines: int = 100,
    text: str | None = None,
) -> Datasets:
    """Returns training triplets, and a row per evaluated user for validation and test.

    Args:
        path: a table of interactions (CSV, TSV), or a folder with MovieLens-1M or -100K files; None = the embedded set.
        scale: size of the embedded set as a share of a million ratings.
        seed: seed of the embedded set, and of the order in a table without times; training has its own.
        min_rating: lowest rating that counts as an interaction; None = every rating above 0.
        passes: passes over the interactions per epoch; None = more for fewer interactions.
        avoid_held_out: whether to exclude a user's validation and test items from negatives. This leaks the held-out
            items, since all others are pushed down. Use it only to compare with code that does so.
        max_bad_lines: maximum number of unreadable lines to skip; 100 is 0.1 % of the smaller set.
        text: the model's ``text``, on which its regularisation depends; None = by the sentences.

    Raises:
        DataError: files are missing or unreadable, have too many bad lines, or no user to evaluate.
        ConfigError: an argument is out of range.
    """
    file = None if path is None else Path(path).expanduser()
    is_table = file is not None and file.is_file()
    has_stars = is_table or min_rating is None or 1 <= min_rating <= 5
    ConfigError.check(
        "workload.data",
        ("scale", scale, 0 < scale <= 4, "is not in (0, 4]", "scale=0.1 or so"),
        ("passes", passes, passes is None or passes >= 1, "is below 1", "passes=null or 1"),
        ("min_rating", min_rating, has_stars, "is not in 1..5", "min_rating=null or 4"),
        ("max_bad_lines", max_bad_lines, max_bad_lines >= 0, "is negative", "0 to allow none"),
    )
    if file is None:
        interactions = synthetic_interactions(scale, seed)
    elif is_table:
        from workloads.recsys.table import read_table  # needs pandas

        interactions = read_table(file, max_bad_lines, seed)
    else:
        interactions = read_movielens(file, max_bad_lines)
    return build(interactions, min_rating, avoid_held_out, passes, is_embedded=file is None, text=text)


def build(
    interactions: Interactions,
    min_rating: float | None = None,
    avoid_held_out: bool = False,
    passes: int | None = None,
    *,
    is_embedded: bool = False,
    text: str | None = None,
) -> Datasets:
    """Splits and wraps interactions of any source; the embedded set has one pass."""
    derived: dict[str, tuple[Any, str]] = {}
    if min_rating is None:
        derived |= _least_rating(interactions)
        min_rating = derived.get("workload.data.min_rating", (None,))[0]
    elif interactions.ratings is None:
        problem = f"{min_rating:g}, but the table has no ratings."
        raise ConfigError([Fault("workload.data.min_rating", problem, "Write workload.data.min_rating=null.")])
    split = leave_last_out(interactions, min_rating)
    num_users, num_items = len(interactions.user_texts), len(interactions.item_texts)
    texts = [*interactions.user_texts, *interactions.item_texts]
    evaluated_E = split.evaluated_users
    if passes is None:
        usual = 1, "the embedded set"
        passes, _ = derived["workload.data.passes"] = usual if is_embedded else _passes(len(split.users))
    train = TripletData(
        split.users,
        split.items,
        num_users=num_users,
        num_items=num_items,
        passes=passes,
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
    num_train = len(train) // passes
    size = (
        f"{counted(num_users, 'user')}, {counted(num_items, 'item')}, {counted(num_train, 'training interaction')}, "
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
            "texts": texts,
        },
        notes=(size, *interactions.notes, *split.notes, *train.notes, *_without_choice(split, num_items)),
        derived={
            **derived,
            "workload.model.l2": _l2(split, texts, text),
            "workload.model.text": (text_of(texts), f"users and items have {'' if any(texts) else 'no '}sentences"),
        },
    )


def _without_choice(split: LeaveLastOut, num_items: int) -> list[str]:
    """Returns a note on users who have chosen all items except the test item."""
    count_E = np.bincount(split.users, minlength=int(split.evaluated_users.max()) + 1)[split.evaluated_users] + 2
    if num := int((count_E == num_items).sum()):
        return [
            f"{counted(num, 'user')} of {len(count_E)} evaluated chose all {num_items} items: the one to find is the "
            "only one left, so it is always found"
        ]
    return []


def _passes(num_interactions: int) -> tuple[int, str]:
    """Returns the passes per epoch, more for fewer interactions, and the reason."""
    passes = max(1, round(math.sqrt(FULL_EPOCH / max(1, num_interactions))))
    return passes, f"{counted(num_interactions, 'training interaction')}; the fewer, the more passes"


def _l2(split: LeaveLastOut, texts: list[str], text: str | None) -> tuple[float, str]:
    """Returns the regularisation and the reason; more for few interactions per user and for text vectors."""
    per_user = len(split.users) / max(1, len(np.unique(split.users)))
    factor = max(1.0, FEW_PER_USER / max(per_user, 1.0)) ** MORE_L2
    used = text or text_of(texts)
    of_text = "sentences" if used == "gpt2" else "sentences unused" if any(texts) else "no sentences"
    reason = f"{of_text}; {per_user:.1f} training interactions a user, below {FEW_PER_USER} it grows"
    return round(min(MOST_L2, USUAL_L2.get(used, USUAL_L2["gpt2"]) * factor), 4), reason


def _least_rating(interactions: Interactions) -> dict[str, tuple[Any, str]]:
    """Returns the lowest rating above 0, if some ratings are not above 0."""
    ratings = interactions.ratings
    if ratings is None or ratings.min() > 0 or ratings.max() <= 0:
        return {}
    reason = f"ratings from {ratings.min():g} to {ratings.max():g}; those of 0 and below are no choice"
    return {"workload.data.min_rating": (float(ratings[ratings > 0].min()), reason)}
