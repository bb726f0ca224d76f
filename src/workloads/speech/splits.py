"""Splits N clips into training, validation and test, so that no speaker is in two of them."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence

from wellfed import DataError
from wellfed.data.shards.class_folders import SPLITS, sample_key
from wellfed.units import counted

SPEAKER = r"([^/]+)_nohash_"
"""Pattern of the speaker in names of Speech Commands: ``yes/0a7c2a8d_nohash_0``."""


_ALONE = "/"
"""Prefix of the key for clips without a speaker."""


def choose_splits(
    names: Sequence[str],
    given: Sequence[str] | None,
    *,
    speaker: str,
    val_frac: float,
    test_frac: float,
    seed: int,
) -> tuple[list[str], list[str]]:
    """Returns the split of each clip, [N], and notes.

    Args:
        given: splits from folders or lists; a missing split gets clips from training.
        speaker: regular expression whose first group is the speaker in a name; clips without one count as their own
            speaker. Dots and blanks are ignored, so that a folder and its shards are split alike.

    Raises:
        DataError: too few clips or speakers.
    """
    splits = list(given) if given is not None else ["train"] * len(names)
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
        due, count, taken = frac * training.total(), 0, set[str]()
        for group in reversed(order):
            if len(order) - len(taken) <= len(wanted) or count >= due:
                break
            if count + training[group] <= 1.5 * due:  # skips a speaker with most of the clips
                taken.add(group)
                count += training[group]
        taken = taken or {min(order, key=training.__getitem__)}  # at least one
        of_group |= dict.fromkeys(taken, split)
        order = [group for group in order if group not in taken]
    chosen = [
        of_group.get(group, "train") if split == "train" else split for group, split in zip(groups, splits, strict=True)
    ]
    found = {group for group in groups if not group.startswith(_ALONE)}
    if not found or len(set(chosen)) == 1:
        return chosen, []
    of_speaker = {(group, split) for group, split in zip(groups, chosen, strict=True) if group in found}
    shared = [group for group, count in Counter(group for group, _ in of_speaker).items() if count > 1]
    if shared:
        first = (
            f"{counted(len(shared), 'speaker')} of {len(found)} in more than one split, {sorted(shared)[0]} among them"
        )
        return chosen, [f"{first}: the given splits decide, and a test on known voices is easier"]
    return chosen, [f"split by speaker: {counted(len(found), 'speaker')}, none in two splits"]


def _speaker(pattern: str, name: str) -> str:
    found = re.search(pattern, name)
    return sample_key(found[1]) if found and found.re.groups and found[1] else f"{_ALONE}{sample_key(name)}"


def _rank(seed: int, name: str) -> bytes:
    """Returns a sort key; adding or removing a speaker hardly changes the order."""
    return hashlib.blake2b(f"{seed}/{name}".encode("utf-8", "surrogateescape"), digest_size=8).digest()
