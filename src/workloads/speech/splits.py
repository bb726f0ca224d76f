"""Chooses the clips to train, validate and test on, so that no speaker is in two of them.

N clips.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence

from wellfed.errors import DataError
from wellfed.shards.class_folders import SPLITS
from wellfed.units import counted

SPEAKER = r"([^/]+)_nohash_"
"""Where Speech Commands has the speaker in a name: ``yes/0a7c2a8d_nohash_0``."""


def choose_splits(
    names: Sequence[str],
    told: Sequence[str] | None,
    *,
    speaker: str,
    val_frac: float,
    test_frac: float,
    seed: int,
) -> tuple[list[str], list[str]]:
    """Split of each clip, [N], and what is to be said of them.

    Args:
        told: where folders or lists say it already; of a part that is missing there, clips are taken from training.
        speaker: regular expression whose first group finds the speaker in a name; a clip without one is its own.

    Raises:
        DataError: too few clips or speakers.
    """
    splits = list(told) if told is not None else ["train"] * len(names)
    has = set(splits)
    groups = [_speaker(speaker, name) for name in names]
    wanted = [(split, frac) for split, frac in (("test", test_frac), ("val", val_frac)) if frac and split not in has]
    training = Counter(group for group, split in zip(groups, splits, strict=True) if split == "train")
    if len(training) <= len(wanted):
        told_by = "speaker" if training.total() > len(training) else "clip"
        raise DataError(
            f"{counted(len(training), told_by)} can't be split into {', '.join(SPLITS)}: workload.data.path needs "
            "more, or set workload.data.val_frac=0 and test_frac=0."
        )
    order = sorted(training, key=lambda group: _rank(seed, group))
    of_group: dict[str, str] = {}
    for split, frac in wanted:
        count = 0
        while len(order) > len(wanted) and (count < frac * training.total() or not count):
            group = order.pop()
            of_group[group], count = split, count + training[group]
        if not count:  # one for each, at least
            of_group[order.pop()] = split
    chosen = [
        of_group.get(group, "train") if split == "train" else split for group, split in zip(groups, splits, strict=True)
    ]
    notes = []
    if wanted and training.total() > len(training):
        notes.append(f"split by speaker: {counted(len(training), 'speaker')}, none in two splits")
    return chosen, notes


def _speaker(pattern: str, name: str) -> str:
    found = re.search(pattern, name)
    return found[1] if found and found.re.groups and found[1] else f"/{name}"


def _rank(seed: int, name: str) -> bytes:
    """Decides on an order that another speaker more or less hardly changes."""
    return hashlib.blake2b(f"{seed}/{name}".encode("utf-8", "surrogateescape"), digest_size=8).digest()
