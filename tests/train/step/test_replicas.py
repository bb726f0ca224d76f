"""A rank that runs out of memory ends, and a sharded model learns what a whole one does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.fake_cuda.machine import FakeCuda
from tests.kit.gloo_ranks import join, leave, of_ranks
from tests.kit.ranks import train_ranks
from wellfed.batches import Delivery
from wellfed.contract import LossOutput
from wellfed.errors import ModelError
from wellfed.train.memory.checkpointing import LEAST_WEIGHTS
from wellfed.train.memory.step_down import Fallbacks, MicroBatches
from wellfed.train.step.gradients import clip_by_norm
from wellfed.train.step.loss import Loss
from wellfed.train.step.micro_batches import Preparation
from wellfed.train.step.precision import Precision
from wellfed.train.step.replicas import Replicas
from wellfed.train.step.step_passes import Computation
from wellfed.train.step.train_step import StepOptions, TrainStep

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")
WIDE = LEAST_WEIGHTS // 12
"""Of a block with so many hidden features the weights are more than `LEAST_WEIGHTS`."""


def distance(one: Any, other: Any) -> float:
    return float((one["weights"] - other["weights"]).norm() / other["weights"].norm())


SMALLER = {"memory.micro_batch": 8}
PLACES = {
    "forward": ({"since": 3, "above": 5}, "with micro-batches of 16", SMALLER),
    "backward": ({"since": 3, "above": 5}, "with micro-batches of 16", SMALLER),
    "step": ({"since": 3}, "in the optimizer's step 3, with micro-batches of 16", SMALLER),
    "within step": ({"since": 3}, "in the optimizer's step 3,", SMALLER),  # when it has changed a weight
}


@pytest.mark.slow
@pytest.mark.parametrize(("device", "precision"), [("cpu", "32-true"), ("cpu", "16-mixed"), ("simulated", "32-true")])
@pytest.mark.parametrize("place", PLACES)
def test_out_of_memory_on_one_rank_ends_it_with_less_for_a_restart(
    tmp_path: Path, fake_cuda: FakeCuda, place: str, device: str, precision: str
) -> None:
    lack, where, changes = PLACES[place]
    if precision == "16-mixed":
        where = where.replace("step 3", "step 4")  # the scaler leaves out the optimizer's first steps
    settings: dict[str, Any] = {"max_steps": 8, "precision": precision, "gradient_clip": 0.5}
    cards: dict[str, str] = {}
    if device == "simulated":
        settings["accelerator"], cards = "gpu", fake_cuda.environment(cards=2, mib=512)
    found = train_ranks(
        tmp_path / "two", 2, cards, micro=16, strategy="ddp", lack={"place": place, "rank": 1, **lack}, **settings
    )
    other, one = found
    assert (other["changes"], one["changes"]) == (None, changes)
    assert "weights" not in other  # its sums fail, since rank 1 is gone
    assert f"Out of memory on rank 1 {where}" in one["error"]
    assert "Tried to allocate" in one["error"]
    (kind, facts), (next_kind, _) = one["events"]
    assert (kind, next_kind) == ("oom", "step_down")
    assert "Tried to allocate" in facts["message"]


@pytest.mark.slow
def test_ranks_drop_out_apart_and_have_the_same_weights(tmp_path: Path) -> None:
    """As many draws on both; the same in a second run."""
    settings: dict[str, Any] = {"micro": 16, "max_steps": 4, "samples": 64, "strategy": "ddp", "dropout": 0.3}
    first, second = train_ranks(tmp_path / "first", 2, **settings)
    assert not torch.equal(first["drawn"], second["drawn"])
    assert torch.equal(first["weights"], second["weights"])
    again = train_ranks(tmp_path / "again", 2, **settings)
    assert [torch.equal(one["drawn"], other["drawn"]) for one, other in zip(again, (first, second), strict=True)] == [
        True
    ] * 2
    assert torch.equal(again[0]["weights"], first["weights"])


@pytest.mark.slow
def test_when_nothing_is_left_a_rank_ends_with_what_to_type(tmp_path: Path) -> None:
    lack = {"place": "forward", "rank": 1, "since": 3}
    other, one = train_ranks(tmp_path / "two", 2, micro=4, max_steps=8, strategy="ddp", lack=lack, may_adapt=False)
    assert (other["changes"], one["changes"]) == (None, None)
    assert "Out of memory on rank 1 with micro-batches of 4: " in one["error"]
    assert "Largest parts: " in one["error"]


def one_of_two(number: int, folder: Path) -> None:
    """Two steps: the first layer is used by all, the second by rank 1, the third by none, since it is frozen."""
    join(number, folder)
    layers = torch.nn.ModuleList(torch.nn.Linear(2, 1, bias=False) for _ in range(3))
    layers[2].requires_grad_(False)
    ranks = Replicas(torch.nn.parallel.DistributedDataParallel(Calling(layers), find_unused_parameters=True))
    used = [layers[0]] + [layers[1]] * number
    for _ in range(2):
        layers.zero_grad()
        ranks.backward(ranks.forward(lambda: (1 + number) * sum(layer(torch.ones(2)).sum() for layer in used)))
    asked = ranks.any(number == 1), ranks.any(False), ranks.total(3 + number)
    ranks.micro_batch(0, 1)
    layers[2].requires_grad_(True)
    with pytest.raises(ModelError) as refused:
        ranks.micro_batch(0, 1)
    leave(number, folder, ([layer.weight.grad for layer in layers], asked, str(refused.value)))


def test_a_gradient_of_one_rank_is_averaged_with_zero_and_an_unfrozen_weight_refused(tmp_path: Path) -> None:
    for gradients, asked, refused in of_ranks(one_of_two, tmp_path):
        assert [None if each is None else each.tolist() for each in gradients] == [[[1.5, 1.5]], [[1, 1]], None]
        assert asked == (True, False, 7)
        assert refused.startswith("2.weight was unfrozen during training on 2 ranks")


class Calling(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, call: Any, *arguments: Any) -> Any:
        return call(*arguments)


class Masked(nn.Module):
    """A mean over what the mask leaves, which is NaN where it leaves nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def loss(self, batch: Any) -> LossOutput:
        x, mask = batch
        loss = self.net(x).squeeze(1)[mask].square().mean()
        return LossOutput(loss, {"root": loss.sqrt()})

    def loss_weight(self, batch: Any) -> int:
        return int(batch[1].sum())


MASKS = [
    [[1, 1, 1, 0], [1, 0, 1, 1]],
    [[1, 1, 0, 0], [0, 0, 0, 1]],  # half of each rank's step counts nothing
    [[0, 0, 0, 0], [1, 1, 1, 1]],  # all of one rank's
    [[0, 0, 0, 0], [0, 0, 0, 0]],
    [[0, 1, 0, 0], [0, 0, 0, 0]],
]
"""Of each step, for each of two ranks: which samples count."""


def masked_steps() -> list[Any]:
    """The samples of all ranks for each step, and which count."""
    torch.manual_seed(5)
    return [(torch.randn(2, 4, 3), torch.tensor(mask).bool()) for mask in MASKS]


def steps_with_masks(number: int, folder: Path) -> None:
    join(number, folder)
    model = Masked()
    wrapped, micro = torch.nn.parallel.DistributedDataParallel(Calling(model)), MicroBatches(2)
    ranks, loss = Replicas(wrapped), Loss(model)
    step = TrainStep(
        Computation(model, loss, Preparation(None, 0, model), Precision("32-true", "cpu"), CPU, ranks=ranks),
        torch.optim.AdamW(model.parameters(), lr=0.1),
        Fallbacks(micro),
        StepOptions(gradient_clip=0.5, on_oom="retry"),
    )
    rows = []
    for index, (x, mask) in enumerate(masked_steps()):
        step(Delivery((x[number], mask[number]), epoch=0, index=index, total=8))
        rows.append(step.totals.take(mean_over_ranks))
    weights = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    leave(number, folder, (weights, rows))


def mean_over_ranks(values: torch.Tensor) -> torch.Tensor:
    torch.distributed.all_reduce(values)
    return values / 2


def test_what_counts_nothing_changes_nothing_on_several_ranks(tmp_path: Path) -> None:
    """NaN x 0 is NaN: a mean over nothing must not be multiplied by its weight."""
    (ours, rows), (others, _) = of_ranks(steps_with_masks, tmp_path)
    model = Masked()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for x, mask in masked_steps():
        if mask.any():
            optimizer.zero_grad()
            loss = model.loss((x.flatten(0, 1), mask.flatten())).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(float(loss.detach()))
    assert torch.equal(ours, others)
    assert torch.allclose(ours, torch.cat([weight.detach().flatten() for weight in model.parameters()]), atol=1e-5)
    assert [row["loss"] for row in rows if row] == pytest.approx(losses, rel=1e-4)
    assert [bool(row) for row in rows] == [True, True, True, False, True]


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float32, torch.float64)])
def test_sparse_gradients_are_clipped_as_dense_ones(dtypes):
    def trained(sparse):
        torch.manual_seed(0)
        table, out = nn.Embedding(9, 4, sparse=sparse, dtype=dtypes[0]), nn.Linear(4, 2, dtype=dtypes[1])
        optimizer = torch.optim.SGD([*table.parameters(), *out.parameters()], lr=0.5)
        for indices in ([1, 2, 1, 1], [5, 5, 0, 3]):
            optimizer.zero_grad()
            (9 * out(table(torch.tensor(indices)).to(dtypes[1])).square().sum()).backward()
            clip_by_norm(optimizer, 0.1)
            optimizer.step()
        return torch.cat([weight.detach().double().flatten() for weight in (table.weight, out.weight)])

    assert torch.allclose(trained(sparse=True), trained(sparse=False), rtol=1e-6, atol=1e-9)


def test_without_gradients_nothing_is_clipped() -> None:
    clip_by_norm(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), 0.1)


@pytest.mark.parametrize("max_norm", [1e-3, 7.5, 1e6])
@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.float32, torch.float64)])
@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_clipped_gradients_are_those_of_torch_bit_for_bit(max_norm, dtypes, value):
    found = []
    for is_ours in (True, False):
        torch.manual_seed(0)
        made = nn.ModuleList(nn.Linear(3, 2, dtype=dtype) for dtype in dtypes)
        made.append(nn.Linear(2, 2))  # without gradients
        for layer in made[:2]:
            layer(torch.randn(4, 3, dtype=layer.weight.dtype)).square().sum().backward()
        if value is not None:
            made[0].weight.grad[0, 0] = value
        if is_ours:
            clip_by_norm(torch.optim.SGD(made.parameters(), lr=0.1), max_norm)
        else:
            nn.utils.clip_grad_norm_(made.parameters(), max_norm)
        found.append([one.grad for one in made.parameters() if one.grad is not None])
    assert all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(*found, strict=True))
