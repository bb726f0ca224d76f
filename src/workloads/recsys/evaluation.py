"""Ranks the whole catalogue for each user: Recall@10 and NDCG@10 of the held-out item.

Shapes: B users of a batch, I items, C items of a chunk, D width of the towers, E evaluated users, L longest list of
seen items.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from wellfed import FeatureSource, SampleRng
from workloads.recsys.interactions import Ints

if TYPE_CHECKING:
    from workloads.recsys.model import TwoTowerRecommender

Floats = NDArray[np.float64]
TOP = 10
ITEM_CHUNK = 1024
"""Items whose text is encoded at a time, if rows are not cached."""
SPLITS = ("val", "test")


class RankedUsers:
    """Rows per evaluated user: the held-out item, and the items to leave out of the ranking.

    Args:
        user_E: the users; ``target_E`` their held-out items.
        seen: users and items of the interactions to leave out, in any order; at least one for each of ``user_E``.
    """

    def __init__(
        self, split: Literal["val", "test"], user_E: Ints, target_E: Ints, *, seen: tuple[Ints, Ints], num_users: int
    ) -> None:
        seen_user_N, seen_item_N = seen
        count_U = np.bincount(seen_user_N, minlength=num_users)
        self._split = SPLITS.index(split)
        self._user_E = torch.from_numpy(user_E)
        self._target_E = torch.from_numpy(target_E)
        self._seen_N = torch.from_numpy(seen_item_N[np.argsort(seen_user_N, kind="stable")])
        self._start_E = torch.from_numpy((np.cumsum(count_U) - count_U)[user_E])
        self._count_E = torch.from_numpy(count_U[user_E])

    def __len__(self) -> int:
        return len(self._user_E)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Returns one row as scalars, with ``seen`` padded to the longest list of the split so that rows can be
        stacked."""
        batch = self._fetch(torch.tensor([range(len(self))[index]]), int(self._count_E.max()))
        return {name: values.squeeze(0) for name, values in batch.items()}

    def fetch(self, indices: Tensor, rng: SampleRng | None = None) -> dict[str, Tensor]:
        """Returns ``user``, ``target``, ``split`` [B] and ``seen`` [B, L], all int64.

        Short lists repeat their first item, which masks nothing new.
        """
        return self._fetch(indices, int(self._count_E.index_select(0, indices).max()))

    def _fetch(self, indices: Tensor, longest: int) -> dict[str, Tensor]:
        start_B1 = self._start_E.index_select(0, indices).unsqueeze(1)
        count_B1 = self._count_E.index_select(0, indices).unsqueeze(1)
        step_L = torch.arange(longest)
        place_BL = start_B1 + torch.where(step_L < count_B1, step_L, 0)
        return {
            "user": self._user_E.index_select(0, indices),
            "target": self._target_E.index_select(0, indices),
            "split": torch.full_like(indices, self._split),
            "seen": self._seen_N.index_select(0, place_BL.flatten()).view(place_BL.shape),
        }


def rank_of_target(scores_BI: Tensor, target_B: Tensor, seen_BL: Tensor) -> Tensor:
    """Returns the rank of each target among the unseen items, from 0, float32 [B]; overwrites ``scores_BI``.

    A higher score counts 1, an equal one 1/2: the expected rank if ties are broken at random. So a constant score ranks
    in the middle. NaN counts as higher; a target with NaN is last.
    """
    scores_BI.scatter_(1, seen_BL, float("-inf"))
    target_B1 = scores_BI.gather(1, target_B.unsqueeze(1))
    not_below_B = (~(scores_BI < target_B1)).sum(1)
    equal_B = (scores_BI == target_B1).sum(1).clamp(min=1)  # at least itself; NaN does not equal itself
    return (not_below_B - equal_B) + 0.5 * (equal_B - 1)


def metrics_of_ranks(rank_E: Floats) -> dict[str, Floats]:
    """Returns Recall@10 and NDCG@10 of each user, [E]; with one relevant item NDCG is 1 / log2(rank + 2)."""
    hit_E = (rank_E < TOP).astype(np.float64)
    return {"recall_at_10": hit_E, "ndcg_at_10": hit_E / np.log2(rank_E + 2)}


def popularity_ranks(data: RankedUsers, item_N: Ints, num_items: int) -> Floats:
    """Returns the ranks of the targets [E] if all users get the most frequent items of ``item_N``."""
    count_I = torch.from_numpy(np.bincount(item_N, minlength=num_items)).float()
    ranks = []
    for start in range(0, len(data), ITEM_CHUNK):
        batch = data.fetch(torch.arange(start, min(start + ITEM_CHUNK, len(data))))
        scores_BI = count_I.repeat(len(batch["user"]), 1)
        ranks.append(rank_of_target(scores_BI, batch["target"], batch["seen"]))
    return torch.cat(ranks).double().numpy()


class Ranking:
    """Recall@10 and NDCG@10 over the full catalogue, without items that the user has already chosen.

    ``update`` keeps the ranks on the device; ``compute`` moves them to the host at once.
    """

    best_metric = "ndcg_at_10"
    best_mode: Literal["max", "min"] = "max"
    with_loss = False
    """False, since the batches have no negatives."""

    def __init__(self, num_users: int, num_items: int) -> None:
        self.num_users = num_users
        self.num_items = num_items
        self.reset()

    def reset(self) -> None:
        """Clears ranks and item vectors, since the model may have changed."""
        self._items: tuple[Tensor, Tensor] | None = None
        self._ranks: list[Tensor] = []

    @torch.no_grad()
    def update(self, model: nn.Module, batch: dict[str, Tensor], /, *features: FeatureSource) -> None:
        """Ranks the targets for the users of a batch.

        Scores are float32 under autocast too, since bfloat16 would tie much of the catalogue.
        """
        towers = cast("TwoTowerRecommender", model)
        source = features[0] if features else None
        user_B = batch["user"]
        if self._items is None:
            self._items = self._item_vectors(towers, user_B.device, source)
        item_ID, bias_I = self._items
        user_BD = towers.user_vectors(user_B, None if source is None else source.rows(user_B))
        with torch.autocast(user_B.device.type, enabled=False):
            scores_BI = torch.addmm(bias_I, user_BD.float(), item_ID.T)
        rank_B = rank_of_target(scores_BI, batch["target"], batch["seen"])
        self._ranks.append(torch.stack([user_B, batch["split"], (2 * rank_B).long()]))  # ranks in halves, as integers

    def state(self) -> list[Tensor]:
        """Returns users, splits and ranks of each batch."""
        return self._ranks

    def merge(self, states: Sequence[list[Tensor]]) -> None:
        """Replaces the batches by those of all ranks, in the order of the split."""
        in_turn = itertools.zip_longest(*states)
        self._ranks = [ranks for batches in in_turn for ranks in batches if ranks is not None]

    def compute(self) -> dict[str, float]:
        """Returns means over the users since `reset`; NaN without users."""
        return {name: float(v.mean()) if len(v) else float("nan") for name, v in self.per_user().items()}

    def per_user(self) -> dict[str, Floats]:
        """Returns the metrics of each user ranked so far, [E]."""
        return metrics_of_ranks(self._gather()[2])

    def artifacts(self, folder: Path) -> dict[str, Path]:
        """Writes ``per_user_<split>.csv``: a row per user (rank from 0 as ``place``), for paired comparisons between
        runs."""
        user_E, split_E, rank_E = self._gather()
        if len(user_E) == 0:
            return {}
        path = folder / f"per_user_{SPLITS[int(split_E[0])]}.csv"
        metrics = metrics_of_ranks(rank_E)
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["user", "place", *metrics])
            writer.writerows(zip(user_E, rank_E, *metrics.values(), strict=True))
        return {path.stem: path}

    def _item_vectors(
        self, towers: TwoTowerRecommender, device: torch.device, source: FeatureSource | None
    ) -> tuple[Tensor, Tensor]:
        """Computes all items' vectors [I, D] and biases [I], float32; once per pass."""
        vectors, biases = [], []
        for start in range(0, self.num_items, ITEM_CHUNK):
            item_C = torch.arange(start, min(start + ITEM_CHUNK, self.num_items), device=device)
            text_CE = None if source is None else source.rows(item_C + self.num_users)
            vector_CD, bias_C = towers.item_vectors(item_C, text_CE)
            vectors.append(vector_CD.float())
            biases.append(bias_C.float())
        return torch.cat(vectors), torch.cat(biases)

    def _gather(self) -> tuple[Ints, Ints, Floats]:
        """Returns user, split and rank of each ranking so far, [E] each, with one transfer from the device."""
        if not self._ranks:
            return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0)
        user_E, split_E, half_ranks_E = torch.cat(self._ranks, dim=1).cpu().numpy()
        return user_E, split_E, half_ranks_E / 2
