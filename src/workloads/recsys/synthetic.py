"""Draws a set of MovieLens-1M's shape, so that the example runs offline.

Every user and film has a hidden taste vector. Part of it follows from the metadata (genre, theme word of the title;
occupation, age, gender), so text helps. The rest is individual, so ids help too. Film popularity has a long tail, so
that recommending popular films is a fair baseline.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from workloads.recsys.interactions import Interactions
from workloads.recsys.text import item_text, user_text

FULL_USERS, FULL_ITEMS, FULL_DENSITY = 6040, 3706, 0.0447
"""Shape of MovieLens-1M (1,000,209 ratings): https://files.grouplens.org/datasets/movielens/ml-1m-README.txt"""
TASTE_DIM = 12
GENRES = (
    "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama", "Fantasy",
    "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western"
)  # fmt: skip
THEMES = (
    "harbor", "winter", "garden", "machine", "letter", "desert", "river", "crown", "mirror", "circus", "island",
    "train", "shadow", "orchard", "engine", "lantern", "valley", "signal", "temple", "market", "storm", "bridge",
    "piano", "comet"
)  # fmt: skip
OPENINGS = (
    "The", "Silent", "Last", "Broken", "Golden", "Hidden", "Long", "Second", "Burning", "Little", "Distant", "Endless"
)  # fmt: skip
OCCUPATIONS = (
    "student", "engineer", "teacher", "writer", "doctor", "lawyer", "farmer", "artist", "clerk", "scientist",
    "retired", "homemaker"
)  # fmt: skip
AGES = (18, 25, 35, 45, 50, 56)

Floats = NDArray[np.float32]


def synthetic_interactions(scale: float, seed: int) -> Interactions:
    """Draws the set.

    Args:
        scale: share of MovieLens-1M's million ratings. Users, items and ratings per user shrink by its square root, so
            that the density stays the same.
        seed: seed of the set; equal seeds give equal sets.
    """
    rng = np.random.default_rng(seed)
    num_users = max(30, round(FULL_USERS * scale**0.5))
    num_items = max(30, round(FULL_ITEMS * scale**0.5))
    item_taste_IK, item_texts = _items(rng, num_items)
    user_taste_UK, user_texts = _users(rng, num_users)
    appeal_I = (-0.9 * np.log(rng.permutation(num_items) + 10)).astype(np.float32)
    wanted_U = rng.lognormal(np.log(FULL_DENSITY * num_items) - 0.32, 0.8, num_users)
    wanted_U = np.clip(wanted_U, 5, num_items // 3).astype(np.int64)

    users, items = [], []
    for start in range(0, num_users, 1024):
        stop = min(start + 1024, num_users)
        utility_BI = user_taste_UK[start:stop] @ item_taste_IK.T + appeal_I
        utility_BI += rng.gumbel(size=utility_BI.shape).astype(np.float32)  # the top n are n draws without replacement
        ranked_BI = np.argsort(-utility_BI, axis=1)
        taken_BI = np.arange(num_items) < wanted_U[start:stop, None]
        users.append(np.repeat(np.arange(start, stop), wanted_U[start:stop]))
        items.append(ranked_BI[taken_BI])
    user_N, item_N = np.concatenate(users), np.concatenate(items)
    return Interactions(
        users=user_N,
        items=item_N,
        ratings=rng.choice([2, 3, 4, 5], size=len(user_N), p=[0.1, 0.25, 0.4, 0.25]).astype(np.int64),
        times=rng.permutation(len(user_N)).astype(np.int64),
        user_texts=user_texts,
        item_texts=item_texts,
    )


def _items(rng: np.random.Generator, num_items: int) -> tuple[Floats, list[str]]:
    """Draws taste vectors [I, K] and sentences of the films."""
    genre_GK = _directions(rng, len(GENRES), 1.9)
    theme_HK = _directions(rng, len(THEMES), 1.4)
    first, second = rng.integers(len(GENRES), size=num_items), rng.integers(len(GENRES), size=num_items)
    theme, opening = rng.integers(len(THEMES), size=num_items), rng.integers(len(OPENINGS), size=num_items)
    year = rng.integers(1950, 2001, size=num_items)
    taste_IK = genre_GK[first] + 0.5 * genre_GK[second] + theme_HK[theme] + _directions(rng, num_items, 1.4)
    texts = [
        item_text(f"{OPENINGS[o]} {THEMES[t]}", int(y), dict.fromkeys((GENRES[a], GENRES[b])))
        for o, t, y, a, b in zip(opening, theme, year, first, second, strict=True)
    ]
    return taste_IK, texts


def _users(rng: np.random.Generator, num_users: int) -> tuple[Floats, list[str]]:
    """Draws taste vectors [U, K] and sentences of the users."""
    job_GK = _directions(rng, len(OCCUPATIONS), 1.3)
    age_GK = _directions(rng, len(AGES), 1.0)
    gender_GK = _directions(rng, 2, 0.7)
    job, age = rng.integers(len(OCCUPATIONS), size=num_users), rng.integers(len(AGES), size=num_users)
    gender = rng.integers(2, size=num_users)
    taste_UK = job_GK[job] + age_GK[age] + gender_GK[gender] + _directions(rng, num_users, 1.6)
    texts = [user_text(AGES[a], "FM"[g], OCCUPATIONS[j]) for a, g, j in zip(age, gender, job, strict=True)]
    return taste_UK, texts


def _directions(rng: np.random.Generator, count: int, length: float) -> Floats:
    """Draws random vectors [count, TASTE_DIM] of about the same length."""
    return rng.normal(0.0, length / TASTE_DIM**0.5, size=(count, TASTE_DIM)).astype(np.float32)
