"""Turns metadata into sentences, and sentences into token ids."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")
NUM_SPECIAL = 2
PAD, UNKNOWN = 0, 1


def user_text(age: int, gender: str, occupation: str) -> str:
    """Returns a sentence such as ``male, age group 25, programmer``; ``gender`` is M or F as in MovieLens."""
    return f"{'female' if gender == 'F' else 'male'}, age group {age}, {occupation}"


def item_text(title: str, year: int | None, genres: Iterable[str]) -> str:
    """Returns a sentence such as ``Heat, 1990s. Action, Crime``."""
    decade = "" if year is None else f", {year // 10 * 10}s"
    return f"{title}{decade}. {', '.join(genres)}"


def words(text: str) -> list[str]:
    """Returns lower-case words without punctuation."""
    return _WORD.findall(text.lower())


def build_vocabulary(texts: Sequence[str], max_words: int = 20_000) -> dict[str, int]:
    """Returns ids of the most frequent words, from `NUM_SPECIAL`; equal counts in alphabetical order."""
    counts = Counter(word for text in texts for word in words(text))
    kept = sorted(counts, key=lambda word: (-counts[word], word))[:max_words]
    return {word: number for number, word in enumerate(kept, NUM_SPECIAL)}


def pad_rows(rows: Sequence[Sequence[int]], max_tokens: int, pad_id: int) -> tuple[Tensor, Tensor]:
    """Returns token ids, int32 ``[len(rows), T]`` padded on the right, and lengths, int32 ``[len(rows)]``.

    T is the longest row's length, at most ``max_tokens``; longer rows are cut. An empty row becomes one ``pad_id`` that
    counts as a token, so that means stay finite.
    """
    cut = [list(row[:max_tokens]) or [pad_id] for row in rows]
    longest = max((len(row) for row in cut), default=1)
    ids_RT = torch.full((len(cut), longest), pad_id, dtype=torch.int32)
    for number, row in enumerate(cut):
        ids_RT[number, : len(row)] = torch.tensor(row, dtype=torch.int32)
    return ids_RT, torch.tensor([len(row) for row in cut], dtype=torch.int32)
