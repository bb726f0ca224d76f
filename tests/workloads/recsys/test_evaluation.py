import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workloads.recsys.data import build
from workloads.recsys.evaluation import RankedUsers, Ranking, rank_of_target
from workloads.recsys.interactions import Interactions
from workloads.recsys.model import TwoTowerRecommender


@given(
    scores=st.lists(st.sampled_from([-1.0, 0.0, 0.5, math.inf, math.nan]), min_size=3, max_size=8),
    seen=st.sets(st.integers(1, 2), min_size=1),
)
def test_place_agrees_with_counting(scores: list[float], seen: set[int]):
    """Item 0 is the target."""
    others = [value for item, value in enumerate(scores) if item and item not in seen]
    target = scores[0]
    place = rank_of_target(torch.tensor([scores]), torch.tensor([0]), torch.tensor([sorted(seen)]))
    if math.isnan(target):
        expected = float(len(scores) - 1)
    else:
        expected = sum(1.0 if v > target or math.isnan(v) else 0.5 if v == target else 0.0 for v in others)
    assert place.item() == expected


@pytest.fixture
def interactions() -> Interactions:
    rng = np.random.default_rng(3)
    pair = rng.choice(40 * 60, size=600, replace=False)
    times = rng.permutation(600)
    return Interactions(pair // 60, pair % 60, np.full(600, 5), times, ["u"] * 40, ["i"] * 60)


def places(data: RankedUsers, model: TwoTowerRecommender, size: int) -> tuple[Ranking, dict[str, float]]:
    ranking = Ranking(40, 60)
    for rows in torch.arange(len(data)).split(size):
        ranking.update(model, data.fetch(rows))
    return ranking, ranking.compute()


def test_metrics_agree_with_sorting_the_catalogue(interactions: Interactions):
    datasets = build(interactions)
    model = TwoTowerRecommender(40, 60, text="none", dim=8, init_std=1.0)
    torch.nn.init.normal_(model.item_bias.weight, std=3.0)
    by_user = [
        interactions.items[interactions.users == u][np.argsort(interactions.times[interactions.users == u])]
        for u in range(40)
    ]
    for data, left_out in ((datasets.val, 2), (datasets.test, 1)):
        gains = []
        for user, items in enumerate(by_user):
            if len(items) < 3:
                continue
            scores = model.user_embedding.weight[user] @ model.item_embedding.weight.T + model.item_bias.weight[:, 0]
            scores = scores.detach().numpy()
            scores[items[:-left_out]] = -np.inf
            place = np.argsort(-scores).tolist().index(items[-left_out])
            gains.append(1 / math.log2(place + 2) if place < 10 else 0.0)
        _, metrics = places(data, model, 7)
        assert metrics["ndcg_at_10"] == pytest.approx(np.mean(gains), rel=1e-6)
        assert metrics["recall_at_10"] == pytest.approx(np.mean(np.array(gains) > 0), rel=1e-6)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_that_share_the_batches_have_the_places_of_one(
    interactions: Interactions, tmp_path: Path, num_ranks: int
):
    data = build(interactions).val
    model = TwoTowerRecommender(40, 60, text="none", dim=8, init_std=1.0)
    alone, metrics = places(data, model, 7)
    ranks = [Ranking(40, 60) for _ in range(num_ranks)]
    for number, rows in enumerate(torch.arange(len(data)).split(7)):
        ranks[number % num_ranks].update(model, data.fetch(rows))
    states = [rank.state() for rank in ranks]
    (expected,) = alone.artifacts(tmp_path).values()
    text = expected.read_text()
    for rank in ranks:
        rank.merge(states)
        assert rank.compute() == metrics
        (found,) = rank.artifacts(tmp_path).values()
        assert found.read_text() == text
