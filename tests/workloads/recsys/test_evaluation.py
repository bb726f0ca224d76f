import csv
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import default_collate

from workloads.recsys.data import build
from workloads.recsys.evaluation import RankedUsers, Ranking, popularity_ranks, rank_of_target
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


def test_reset_forgets_places_and_item_vectors(interactions: Interactions):
    data = build(interactions).val
    model = TwoTowerRecommender(40, 60, text="none", dim=8, init_std=1.0)
    ranking, before = places(data, model, 40)
    with torch.no_grad():
        model.item_embedding.weight.neg_()
    ranking.reset()
    assert math.isnan(ranking.compute()["ndcg_at_10"])
    ranking.update(model, data.fetch(torch.arange(len(data))))
    assert ranking.compute() == places(data, model, 40)[1] != before


def test_item_vectors_are_computed_once_a_pass(interactions: Interactions, monkeypatch: pytest.MonkeyPatch):
    calls = []
    model = TwoTowerRecommender(40, 60, text="none", dim=8)
    original = model.item_vectors
    monkeypatch.setattr(model, "item_vectors", lambda *args: calls.append(1) or original(*args))
    places(build(interactions).val, model, 5)
    assert len(calls) == 1


def test_a_constant_score_is_no_better_than_chance(interactions: Interactions):
    model = TwoTowerRecommender(40, 60, text="none", dim=8, init_std=0.0)
    assert places(build(interactions).val, model, 40)[1] == {"recall_at_10": 0.0, "ndcg_at_10": 0.0}


def test_scores_stay_float32_under_autocast(interactions: Interactions):
    """Scores that differ by less than bfloat16 can tell."""
    data = build(interactions).val
    model = TwoTowerRecommender(40, 60, text="none", dim=8, init_std=1e-3)
    with torch.no_grad():
        model.user_embedding.weight.add_(1)
        model.item_embedding.weight.add_(1)
    expected = places(data, model, 40)[0].per_user()["ndcg_at_10"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = places(data, model, 40)[0].per_user()["ndcg_at_10"]
    assert expected.max() > 0
    assert np.array_equal(got, expected)


def test_one_file_a_split_with_one_row_a_user(interactions: Interactions, tmp_path: Path):
    model = TwoTowerRecommender(40, 60, text="none", dim=8, init_std=1.0)
    datasets = build(interactions)
    for split in ("val", "test"):
        ranking, metrics = places(getattr(datasets, split), model, 16)
        path = ranking.artifacts(tmp_path)[f"per_user_{split}"]
        with path.open() as file:
            table = list(csv.DictReader(file))
        assert [int(row["user"]) for row in table] == getattr(datasets, split).fetch(torch.arange(len(table)))[
            "user"
        ].tolist()
        assert np.mean([float(row["ndcg_at_10"]) for row in table]) == pytest.approx(metrics["ndcg_at_10"])


def test_rows_can_be_collated_and_mask_the_same(interactions: Interactions):
    data = build(interactions).test
    rows = default_collate([data[index] for index in range(len(data))])
    batch = data.fetch(torch.arange(len(data)))
    assert torch.equal(rows["target"], batch["target"])
    for one, other in zip(rows["seen"].tolist(), batch["seen"].tolist(), strict=True):
        assert set(one) == set(other)


def test_popularity_recommends_what_is_chosen_most():
    """Items 0..10 by falling count; targets are the most popular, the 10th and the 11th item."""
    counts = np.repeat(np.arange(12), np.arange(12, 0, -1))
    users = RankedUsers(
        "val", np.arange(3), np.array([0, 9, 11]), seen=(np.arange(3), np.array([11, 11, 0])), num_users=3
    )
    assert popularity_ranks(users, counts, 12).tolist() == [0.0, 9.0, 10.0]


class Asked:
    """Rows that remember which were asked for."""

    def __init__(self, source):
        self.source, self.indices = source, []

    def rows(self, indices):
        self.indices += indices.tolist()
        return self.source.rows(indices)


def test_each_user_and_item_is_ranked_by_its_own_text(interactions: Interactions):
    data = build(interactions).val
    model = TwoTowerRecommender(40, 60, [f"user {n}" for n in range(40)] + [f"film {n}" for n in range(60)], dim=8)
    asked, ranking = Asked(model.features()), Ranking(40, 60)
    batch = data.fetch(torch.arange(len(data)))
    ranking.update(model, batch, asked)
    assert asked.indices == [*range(40, 100), *batch["user"].tolist()]
