"""Chooses few combinations of options such that any two values of different options meet in one of them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations

Row = dict[str, str]
"""Option -> value."""
Pair = frozenset[tuple[str, str]]
"""Two options with a value each."""


def pairs_of(row: Mapping[str, str]) -> set[Pair]:
    """All pairs that meet in a combination."""
    return {frozenset(pair) for pair in combinations(row.items(), 2)}


def all_pairs(options: Mapping[str, Sequence[str]]) -> list[Pair]:
    """All that must meet somewhere, in the order of the options."""
    return [
        frozenset(((one, value), (other, another)))
        for one, other in combinations(options, 2)
        for value in options[one]
        for another in options[other]
    ]


def covering_array(options: Mapping[str, Sequence[str]]) -> list[Row]:
    """Combinations of a value for each option; the same again for the same options.

    Each begins with the first pair that has not met yet and takes for each other option the value that brings most
    such pairs, or has been taken least: hardly more of them than the two longest options have combinations.
    """
    missing = dict.fromkeys(all_pairs(options))
    used: Counter[tuple[str, str]] = Counter()
    rows: list[Row] = []
    while missing:
        chosen = dict(next(iter(missing)))
        for option in options:
            if option not in chosen:
                tried = [{**chosen, option: value} for value in options[option]]
                chosen = max(
                    tried,
                    key=lambda row, option=option: (len(pairs_of(row) & missing.keys()), -used[option, row[option]]),
                )
        used.update(chosen.items())
        rows.append({option: chosen[option] for option in options})
        for pair in pairs_of(chosen):
            missing.pop(pair, None)
    return rows
