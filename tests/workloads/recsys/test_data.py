import subprocess
import sys
from pathlib import Path

import pytest
import torch

from wellfed import ConfigError, Datasets, SampleRng, TrainData
from workloads.recsys.data import build, datasets
from workloads.recsys.evaluation import metrics_of_ranks, popularity_ranks
from workloads.recsys.model import TwoTowerRecommender
from workloads.recsys.synthetic import synthetic_interactions


def test_a_folder_is_read_split_and_described(ml_100k: Path):
    made = datasets(str(ml_100k), passes=1)
    assert isinstance(made.train, TrainData)
    assert (len(made.train), len(made.val), len(made.test)) == (2, 2, 2)
    assert made.model_args["num_users"] == 2
    assert made.model_args["texts"][2] == "Heat, 1990s. Action, Crime"
    assert made.notes[0] == "2 users, 3 items, 2 training interactions, 2 users evaluated"
    (ml_100k / "u.user").write_text("1|25|F|programmer|1\n")
    alone = datasets(str(ml_100k), max_bad_lines=3)
    assert alone.notes[0] == "1 user, 3 items, 1 training interaction, 1 user evaluated"
    val, test = made.val.fetch(torch.arange(2)), made.test.fetch(torch.arange(2))
    assert (val["target"].tolist(), test["target"].tolist()) == ([1, 0], [2, 1])
    assert val["seen"].tolist() == [[0], [2]]
    assert [set(row) for row in test["seen"].tolist()] == [{0, 1}, {2, 0}]


def test_negatives_are_no_training_items_and_may_be_held_out_ones():
    """What is never pushed down gives itself away: held-out items must be as likely as any other."""
    made = synthetic_interactions(0.005, 0)
    for avoid in (False, True):
        data = build(made, avoid_held_out=avoid)
        train = data.train.fetch(torch.arange(len(data.train)), SampleRng(0, 0))
        trained = set(zip(train["user"].tolist(), train["pos"].tolist(), strict=True))
        held = {
            pair
            for split in (data.val, data.test)
            for batch in [split.fetch(torch.arange(len(split)))]
            for pair in zip(batch["user"].tolist(), batch["target"].tolist(), strict=True)
        }
        drawn = []
        for epoch in range(5):
            batch = data.train.fetch(torch.arange(len(data.train)), SampleRng(0, epoch))
            drawn += zip(batch["user"].tolist(), batch["neg"].tolist(), strict=True)
        assert trained.isdisjoint(drawn)
        share = sum(pair in held for pair in drawn) / len(drawn)
        per_item = 2 / data.model_args["num_items"]
        assert share == 0 if avoid else share == pytest.approx(per_item, rel=0.3)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"scale": 0}, "scale"),
        ({"scale": 9}, "scale"),
        ({"min_rating": 6}, "min_rating"),
        ({"max_bad_lines": -1}, "max_bad_lines"),
    ],
)
def test_arguments_out_of_range_are_named(arguments: dict[str, float], name: str):
    with pytest.raises(ConfigError, match=rf"workload\.data\.{name}"):
        datasets(**arguments)


@pytest.mark.slow
def test_data_needs_no_transformers():
    modules = "workloads.recsys.data, workloads.recsys.model"
    code = f"import sys, {modules}; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": "src"})


class Table:
    """All rows, computed once."""

    def __init__(self, rows):
        self._rows = rows

    def rows(self, indices):
        return self._rows.index_select(0, indices)


def ndcg(made: Datasets, model: TwoTowerRecommender, features: tuple[Table, ...]) -> float:
    model.eval()
    made.evaluation.reset()
    for rows in torch.arange(len(made.test)).split(256):
        made.evaluation.update(model, made.test.fetch(rows), *features)
    return made.evaluation.compute()["ndcg_at_10"]


@pytest.mark.parametrize("text", [pytest.param("gpt2", marks=pytest.mark.slow), "none"])
def test_a_short_training_beats_popularity_by_far(text: str):
    made = datasets(scale=0.03)
    torch.manual_seed(0)
    model = TwoTowerRecommender(**made.model_args, text=text, dim=32, encoder_dim=64, mlp_hidden=64, l2=0.003)
    wanted = model.features()
    features = () if wanted is None else (Table(wanted.rows(torch.arange(wanted.num_rows))),)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2, weight_decay=0)
    for epoch in range(15):
        order = torch.randperm(len(made.train), generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(512):
            rng = SampleRng(0, epoch)
            loss = model.loss(made.train.on_device(made.train.fetch(rows, rng), rng, *features)).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    items = made.train.fetch(torch.arange(len(made.train)), SampleRng(0, 0))["pos"].numpy()
    baseline = metrics_of_ranks(popularity_ranks(made.test, items, made.model_args["num_items"]))["ndcg_at_10"].mean()
    reached = ndcg(made, model, features)
    print(f"text={text}: NDCG@10 {reached:.4f}, popularity {baseline:.4f}")
    assert reached > 1.4 * baseline
