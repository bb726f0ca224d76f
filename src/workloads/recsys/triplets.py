"""Draws triplets for training (user, chosen item, other item), a whole batch with one lookup each."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from wellfed import DataError, FeatureSource, SampleRng
from wellfed.units import counted, show_count
from workloads.recsys.interactions import Ints

TABLE_CELLS = 2**26
"""Maximum number of users x items for listing all free items: 128 MiB of int16 (int32 from 32,768 items).

A lookup then replaces a search of 0.25-0.5 ms per batch.
"""


class NegativeSampler:
    """A sampler that draws uniformly from the items a user never chose, with one random number and no rejection.

    Let a user's chosen items be p_0 < p_1 < .... The r-th item (from 0) that was not chosen is r plus the count of k
    with p_k - k <= r. The values p_k - k never fall within a user. So the keys user * I + p_k - k are sorted over all
    users, and one binary search answers a whole batch. Small sets list the answers instead.
    """

    def __init__(
        self, user_N: Ints, item_N: Ints, *, num_users: int, num_items: int, table_cells: int = TABLE_CELLS
    ) -> None:
        pair = np.unique(user_N * num_items + item_N)
        user = pair // num_items
        count_U = np.bincount(user, minlength=num_users)
        self._num_items = num_items
        self.num_free_U = torch.from_numpy(num_items - count_U)
        """Number of items that each user did not choose, int64 [U]."""
        self._start_U = torch.from_numpy(np.cumsum(count_U) - count_U)
        self._key_N = torch.from_numpy(pair - (np.arange(len(pair)) - self._start_U.numpy()[user]))
        self._free_F: Tensor | None = None
        if num_users * num_items <= table_cells:
            is_free = np.ones(num_users * num_items, dtype=bool)
            is_free[pair] = False
            free = np.flatnonzero(is_free) % num_items
            self._free_F = torch.from_numpy(free.astype(np.int16 if num_items < 2**15 else np.int32))
            self._free_start_U = self.num_free_U.cumsum(0) - self.num_free_U

    def draw(self, user_B: Tensor, indices_B: Tensor, rng: SampleRng) -> Tensor:
        """Draws items, int64 [B], as a function of the rng's (seed, epoch), the sample's index and its user."""
        rank_B = rng.randint_at(indices_B, self.num_free_U.index_select(0, user_B))
        if self._free_F is not None:
            rank_B += self._free_start_U.index_select(0, user_B)
            return self._free_F.index_select(0, rank_B).long()
        passed_B = torch.searchsorted(self._key_N, user_B * self._num_items + rank_B, right=True)
        return rank_B + passed_B - self._start_U.index_select(0, user_B)


class TripletData:
    """Training samples, ``passes`` for each interaction, each with its own negative.

    Args:
        user_N: user of each training interaction; ``item_N`` its item.
        avoid: users [M] and items [M] never drawn as negatives; None = the training interactions.
    """

    def __init__(
        self,
        user_N: Ints,
        item_N: Ints,
        *,
        num_users: int,
        num_items: int,
        avoid: tuple[Ints, Ints] | None = None,
        passes: int = 1,
        table_cells: int = TABLE_CELLS,
    ) -> None:
        self.num_users, self.passes = num_users, passes
        avoid_user_M, avoid_item_M = (user_N, item_N) if avoid is None else avoid
        self.sampler = NegativeSampler(
            avoid_user_M, avoid_item_M, num_users=num_users, num_items=num_items, table_cells=table_cells
        )
        has_free_N = (self.sampler.num_free_U.numpy() > 0)[user_N]
        self.notes: tuple[str, ...] = ()
        if dropped := int((~has_free_N).sum()):
            text = "of users who chose every item, left out of training: no negatives"
            self.notes = (f"{counted(dropped, 'interaction')} {text}",)
        if dropped == len(user_N):
            raise DataError(
                f"All {show_count(len(user_N))} training interactions are of users who chose every one of the "
                f"{show_count(num_items)} items, so there is nothing to rank. Point workload.data.path at a larger set."
            )
        self._user_N = torch.from_numpy(user_N[has_free_N].astype(np.int32))
        self._item_N = torch.from_numpy(item_N[has_free_N].astype(np.int32))

    def __len__(self) -> int:
        return self.passes * len(self._user_N)

    def __getitem__(self, index: int, rng: SampleRng | None = None) -> dict[str, Tensor]:
        """Returns one sample as scalars, equal to a row of `fetch`; without ``rng`` for seed 0, epoch 0."""
        batch = self.fetch(torch.tensor([range(len(self))[index]]), rng or SampleRng(0, 0))
        return {name: values.squeeze(0) for name, values in batch.items()}

    def fetch(self, indices: Tensor, rng: SampleRng) -> dict[str, Tensor]:
        """Returns ``user``, ``pos``, ``neg``: int64 [B]."""
        place_B = indices if self.passes == 1 else indices % len(self._user_N)
        user_B = self._user_N.index_select(0, place_B).long()
        neg_B = self.sampler.draw(user_B, indices, rng)
        return {"user": user_B, "pos": self._item_N.index_select(0, place_B).long(), "neg": neg_B}

    def on_device(
        self, batch: dict[str, Tensor], rng: SampleRng, features: FeatureSource | None = None
    ) -> dict[str, Tensor]:
        """Adds text rows [B, E] to the batch if the model has text."""
        if features is None:
            return batch
        text = {
            "user_text": features.rows(batch["user"]),
            "pos_text": features.rows(batch["pos"] + self.num_users),
            "neg_text": features.rows(batch["neg"] + self.num_users),
        }
        return batch | text
