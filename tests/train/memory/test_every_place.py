"""Memory runs out in every place of a training on one device, in three precisions: each time it is the same training.

On the CPU the errors are planted; on a simulated card its allocator really has no room. That a run says what it did
(and skips the ceiling, or the probe before training) is for tests of runs: tests/end_to_end/test_out_of_memory.py,
tests/run/passes/test_passes.py and tests/run/micro_batch/test_real_steps.py.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kit import tiny
from tests.kit.few import few
from tests.kit.rank import AsksInBackward
from wellfed import batches
from wellfed.batches import Delivery
from wellfed.contract import Features, LossOutput
from wellfed.data.device_prefetch import DevicePrefetcher
from wellfed.data.eval_loader import EvalLoader
from wellfed.errors import RestartNeeded
from wellfed.train.loop.place import Place as OnDevices
from wellfed.train.loop.placed_model import PlacedModel
from wellfed.train.memory import oom
from wellfed.train.memory.features import FeatureTable
from wellfed.train.memory.step_down import Fallbacks, MicroBatches
from wellfed.train.step.loss import Loss
from wellfed.train.step.micro_batches import Preparation
from wellfed.train.step.precision import Precision
from wellfed.train.step.step_passes import Computation
from wellfed.train.step.train_step import StepOptions, TrainStep

CPU = torch.device("cpu")
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
STEPS_PER_EPOCH = 3  # of 32, 32 and 6 samples
MIB = 2**20
CARD = {"cards": 1, "mib": 64}
FITS = 5
"""Samples in a place without room. On the card each asks for 10 MiB of 64."""


@dataclass
class Place:
    """Where memory does not suffice, from the n-th time on that the place is come to."""

    name: str
    since: int = 1
    until: float = math.inf
    changes: tuple[str, ...] = ("micro_batch=8", "micro_batch=4")
    """What the training must have done about it."""
    uses: int = field(default=0, init=False)

    def come_to(self, name: str, device: torch.device, size: int = 100) -> None:
        """``size``: samples that have to fit there."""
        if name != self.name:
            return
        self.uses += 1
        if not self.since <= self.uses < self.until:
            return
        if device.type == "cuda":
            torch.empty(size * 10 * MIB, dtype=torch.uint8, device=device)
        elif size > FITS:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")


HALVES = ("evaluation_batch=16", "evaluation_batch=8", "evaluation_batch=4")
PLACES = {
    "nowhere": lambda: Place("", changes=()),
    "first batch": lambda: Place("forward"),
    "forward": lambda: Place("forward", since=12),  # the second micro-batch of a step
    "mid-backward": lambda: Place("backward", since=12),
    "copy ahead": lambda: Place("copy", since=2, until=4, changes=()),
    "feature table": lambda: Place("table", until=3, changes=("memory.features=cache_host", "memory.features=dynamic")),
    "validation": lambda: Place("val", changes=HALVES),
    "test": lambda: Place("test", changes=HALVES),
}


PLANTED = [
    pytest.param(name, precision, marks=[] if PRECISIONS[number % 3] == precision else [pytest.mark.slow])
    for number, name in enumerate(name for name in PLACES if name != "nowhere")
    for precision in PRECISIONS
]
"""Every place of the CPU with each precision; by default with one, in turns."""


class Careless(nn.Module):
    """Asks for memory, changes buffers in place and by others, and with dropout draws from torch's generators."""

    def __init__(self, place: Place, dropout: float) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(tiny.WIDTH, 16), nn.Linear(16, 1)
        self.between = nn.Sequential(nn.LayerNorm(16), nn.GELU(), nn.Dropout(dropout))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("latest", torch.zeros(()))
        self.register_buffer("table", torch.arange(2**19, dtype=torch.float32))  # large, and stays as it is
        self.place, self.is_random, self.split = place, dropout > 0, "train"
        self.seen: list[int] = []

    def loss(self, batch: Any) -> LossOutput:
        x, size = batch["x"], len(batch["x"])
        if self.training:
            self.seen += batch["id"].tolist()
            self.count += 1
        self.place.come_to("forward" if self.training else self.split, x.device, size)
        hidden = self.between(AsksInBackward.apply(self.first(x), self.place))
        loss = (self.last(hidden).float() - batch["y"]).square().mean()
        if not self.training:
            return LossOutput(loss)
        self.latest = loss.detach().clone()
        if self.is_random:
            drawn = torch.rand((), device=x.device)
            loss = loss * (0.5 + drawn + self.table[0])
        return LossOutput(loss)


class Data(tiny.TinyData):
    """Samples with their numbers, and a row of features each."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self._place = place
        self._rows = torch.linspace(-1, 1, tiny.NUM_SAMPLES * tiny.WIDTH).view(-1, tiny.WIDTH)

    def fetch(self, indices: Tensor, rng: Any) -> dict[str, Tensor]:
        return {**super().fetch(indices, rng), "id": indices}

    def on_device(self, batch: Any, rng: Any, features: Any) -> Any:
        return {**batch, "x": batch["x"] + features.rows(batch["id"])}

    def features(self) -> Features:
        def rows(indices: Tensor) -> Tensor:
            self._place.come_to("table", indices.device)
            return self._rows.to(indices.device).index_select(0, indices)

        return Features(len(self._rows), self._rows.nbytes, rows)


class Momentum(torch.optim.SGD):
    """Runs out of memory when it has changed its first weight."""

    place = Place("")

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        first = self.param_groups[0]["params"][0]
        if self.place.name == "optimizer" and self.place.uses + 1 >= self.place.since:
            with torch.no_grad():
                first.add_(1.0)
        self.place.come_to("optimizer", first.device)
        super().step()
        return loss


@dataclass
class Training:
    """What is left of one."""

    weights: Tensor
    state: list[Tensor]
    drawn: Any
    seen: dict[int, list[int]]
    """Numbers of the samples that steps were made of, by epoch."""
    figures: list[float]
    changes: list[str]
    micro: dict[int, int]
    """New sizes of micro-batches by the step that was done again with them."""


class Journal:
    """Keeps the changes, and has the model forget the samples of a step that failed."""

    def __init__(self, model: Careless) -> None:
        self._model = model
        self.changes: list[str] = []
        self.micro: dict[int, int] = {}
        self.num_failures = 0

    def step(self, kind: str, *, step: int = 0, **facts: Any) -> None:
        if kind == "oom":
            self._model.seen.clear()
        if "micro_batch" in facts:
            self.micro[step] = facts["micro_batch"]
        self.other(kind, **facts)

    def other(self, kind: str, **facts: Any) -> None:
        self.num_failures += kind == "oom"
        for name in ("micro_batch", "evaluation_batch"):
            self.changes += [f"{name}={facts[name]}"] if name in facts else []
        self.changes += [facts["change"]] if "change" in facts else []

    def no_room(self, error: Exception) -> bool:
        self.other("oom")
        return oom.classify(error) is not None


def trained(
    place: Place,
    precision: str,
    device: torch.device,
    *,
    steps: int = 21,
    dropout: float = 0.2,
    by_hand: Mapping[int, int] = {},
) -> Training:
    """A training that begins with the same weights and generators whatever the place is.

    Args:
        by_hand: sizes of micro-batches to go on with, by the step that is the first of that size.
    """
    torch.manual_seed(7)
    model, data = Careless(place, dropout).to(device), Data(place)
    journal, micro = Journal(model), MicroBatches(16)
    table = FeatureTable(data.features(), "cache", may_change=True)
    table.hold(model, device, journal.other)
    optimizer = Momentum(model.parameters(), lr=0.02, momentum=0.9, foreach=True)
    optimizer.place = place
    rungs = {"memory.features=dynamic": lambda: table.move_to("dynamic", device)}
    computation = Computation(
        model,
        Loss(model),
        Preparation(data, 1),
        Precision.for_training(precision, device.type),
        device,
        features=lambda: table.source,
    )
    retry = StepOptions(on_oom="retry")
    step = TrainStep(computation, optimizer, Fallbacks(micro, rungs), retry, on_event=journal.step)
    splits = ("val", "test")
    evaluating = PlacedModel(
        model,
        OnDevices(),
        retry,
        train_data=data,
        eval_data=dict.fromkeys(splits, data),
        micro=micro,
        make_optimizer=lambda module: optimizer,
        lr_factor=lambda step: 1.0,
        on_event=journal.other,
    )
    evaluating.place.device, evaluating._features = device, table
    evaluating.precision = Precision("32-true", device.type)
    torch.manual_seed(5)
    seen: dict[int, list[int]] = {}
    figures: list[float] = []

    def move(batch: Any, where: torch.device) -> Any:
        place.come_to("copy", where)
        return batches.to_device(batch, where)

    ahead = DevicePrefetcher(tiny.loader(data=data), device, 3, move=move, no_room=journal.no_room)
    for delivery in islice(_epochs(ahead), steps):
        if step.number + 1 in by_hand:
            while micro.size > by_hand[step.number + 1]:
                micro.step_down()
        step(delivery)
        seen.setdefault(delivery.epoch, []).extend(model.seen)
        model.seen.clear()
        if step.number in (6, 12):
            for model.split in splits:
                figures.append(evaluating.evaluate(model.split, EvalLoader(data, 32, seed=1), step.number)["loss"])
    ahead.close()
    drawn = [
        torch.get_rng_state().tolist(),
        torch.cuda.get_rng_state(device).tolist() if device.type == "cuda" else None,
    ]
    weights = torch.cat([weight.detach().flatten() for weight in model.parameters()]).cpu()
    state = [each.cpu() for each in model.buffers()]
    state += [value.cpu() for entry in optimizer.state.values() for value in entry.values()]
    assert bool(journal.num_failures) == bool(place.name)
    return Training(weights, state, drawn, seen, figures, journal.changes, journal.micro)


def _epochs(loader: Any) -> Iterator[Delivery]:
    while True:
        yield from loader


def check(name: str, precision: str, device: torch.device) -> None:
    """Survived, every sample once, and bit for bit the training of that micro-batch schedule, given by hand."""
    place = PLACES[name]()
    disturbed = trained(place, precision, device)
    assert disturbed.changes == list(place.changes)
    assert len(disturbed.seen) == 21 // STEPS_PER_EPOCH
    assert all(sorted(ids) == list(range(tiny.NUM_SAMPLES)) for ids in disturbed.seen.values())
    by_hand = trained(PLACES["nowhere"](), precision, device, by_hand=disturbed.micro)
    assert torch.isfinite(disturbed.weights).all()
    assert torch.equal(disturbed.weights, by_hand.weights), name
    assert all(torch.equal(*pair) for pair in zip(disturbed.state, by_hand.state, strict=True)), name
    assert disturbed.drawn == by_hand.drawn, name
    assert disturbed.figures == pytest.approx(by_hand.figures, rel=1e-5 if precision == "32-true" else 1e-2)


@pytest.mark.parametrize(("name", "precision"), PLANTED)
def test_planted_errors(name: str, precision: str) -> None:
    check(name, precision, CPU)


@pytest.mark.slow
@pytest.mark.simulated(**CARD)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_card_that_has_no_room(precision: str) -> None:
    import fake_cuda

    for name in PLACES:
        check(name, precision, torch.device("cuda", 0))
        torch.cuda.empty_cache()
    assert fake_cuda.driver.violations() == []


@pytest.mark.parametrize("precision", few(PRECISIONS, 1))
def test_a_step_of_the_optimizer_needs_the_last_checkpoint(precision: str) -> None:
    step = 11 if precision == "16-mixed" else 8  # the scaler has left out three steps by then
    with pytest.raises(RestartNeeded, match=f"in the optimizer's step {step},") as caught:
        trained(Place("optimizer", since=8), precision, CPU)
    assert (caught.value.changes, caught.value.kind) == ({"memory.micro_batch": 8}, "device_oom")
