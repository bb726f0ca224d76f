import math

import pytest
import torch

from wellfed import ConfigError
from workloads.recsys.model import TwoTowerRecommender

TEXTS = ["male, writer", "female, farmer of many things", "a film", "another one", "a third film. Crime, Drama"]


def batch(size: int = 6) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        "user": torch.randint(2, (size,), generator=draw),
        "pos": torch.randint(3, (size,), generator=draw),
        "neg": torch.randint(3, (size,), generator=draw),
    }


def with_text(model: TwoTowerRecommender, plain: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    rows = model.features().rows
    return plain | {
        "user_text": rows(plain["user"]),
        "pos_text": rows(plain["pos"] + 2),
        "neg_text": rows(plain["neg"] + 2),
    }


def test_without_text_it_is_bpr_matrix_factorisation():
    model = TwoTowerRecommender(2, 3, text="none", dim=4, init_std=1.0, l2=0.1)
    torch.nn.init.normal_(model.item_bias.weight)
    assert model.features() is None
    assert {name for name, _ in model.named_parameters()} == {
        "user_embedding.weight", "item_embedding.weight", "item_bias.weight",
    }  # fmt: skip
    users, items = model.user_embedding.weight.detach(), model.item_embedding.weight.detach()
    biases = model.item_bias.weight.detach()
    expected = []
    for user, pos, neg in zip(*(values.tolist() for values in batch().values()), strict=True):
        u, p, n = users[user], items[pos], items[neg]
        margin = float(u @ p + biases[pos] - u @ n - biases[neg])
        expected.append(math.log1p(math.exp(-margin)) + 0.1 * float(u @ u + p @ p + n @ n))
    output = model.loss(batch())
    assert output.loss.item() == pytest.approx(sum(expected) / 6, rel=1e-5)
    pos, neg = model(batch())
    assert output.metrics["auc"].item() == pytest.approx((pos > neg).float().mean().item())
    assert output.num_samples == 6


@pytest.mark.parametrize("text", ["none", "gpt2"])
def test_the_loss_of_a_batch_is_the_weighted_mean_of_its_parts(text: str):
    model = TwoTowerRecommender(2, 3, TEXTS, text=text, dim=4, encoder_dim=16, l2=0.1, init_std=1.0)
    whole = batch(10) if text == "none" else with_text(model, batch(10))
    parts = [{name: values.narrow(0, *place) for name, values in whole.items()} for place in ((0, 3), (3, 7))]
    model.loss(whole).loss.backward()
    expected = [p.grad.clone() for p in model.parameters() if p.requires_grad]
    model.zero_grad()
    for part in parts:
        (model.loss(part).loss * len(part["user"]) / 10).backward()
    for got, want in zip((p.grad for p in model.parameters() if p.requires_grad), expected, strict=True):
        assert torch.allclose(got, want, atol=1e-6)


def test_both_towers_use_the_text():
    model = TwoTowerRecommender(2, 3, TEXTS, dim=4, encoder_dim=16)
    one = with_text(model, batch())
    pos, neg = model(one)
    for name in ("user_text", "pos_text", "neg_text"):
        changed = model(one | {name: one[name].flip(0)})
        assert not torch.allclose(torch.cat(changed), torch.cat((pos, neg)))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"text": "bert"}, "text"),
        ({"text": "none", "train_encoder": True}, "train_encoder"),
        ({"text": "none", "pretrained": "gpt2"}, "pretrained"),
        ({"encoder_dim": 30, "encoder_heads": 4}, "encoder_dim"),
        ({"lora_rank": -1}, "lora_rank"),
        ({"dim": 0}, "dim"),
        ({"encoder_heads": 0}, "encoder_heads"),
    ],
)
def test_arguments_that_contradict_each_other_are_named(arguments: dict[str, object], name: str):
    with pytest.raises(ConfigError, match=rf"workload\.model\.{name}: "):
        TwoTowerRecommender(2, 3, TEXTS, **arguments)
