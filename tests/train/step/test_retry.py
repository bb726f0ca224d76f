"""A step that is done again is the same step, whatever ran out of memory."""

from typing import Any

import pytest
import torch

from tests.kit import loop, tiny
from wellfed.batches import Delivery
from wellfed.contract import Features, LossOutput
from wellfed.errors import OutOfMemoryExhausted, RestartNeeded
from wellfed.observe.timing.step_clock import StepRow
from wellfed.train.loop.place import Place
from wellfed.train.loop.placed_model import PlacedModel
from wellfed.train.loop.training import Watchers
from wellfed.train.memory.reasons import MemoryGrowth
from wellfed.train.memory.step_down import Fallbacks, MicroBatches
from wellfed.train.step.loss import Loss
from wellfed.train.step.micro_batches import Preparation
from wellfed.train.step.precision import Precision
from wellfed.train.step.step_passes import Computation
from wellfed.train.step.train_step import StepOptions, TrainStep

CPU = torch.device("cpu")


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")


def oom_above(limit: int) -> Any:
    return lambda size, call: out_of_memory() if size > limit else None


class Notes:
    """The events of a run."""

    def __init__(self) -> None:
        self.all: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, kind: str, **facts: Any) -> None:
        self.all.append((kind, facts))

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.all]


class Careless(tiny.TinyModel):
    """Draws from torch's generator and counts its calls in a buffer, then replaces another."""

    def __init__(self, fail: Any = None) -> None:
        super().__init__(0.2)
        self.fails = fail
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("latest", torch.zeros(()))
        self.register_buffer("table", torch.arange(2**19, dtype=torch.float32))  # large, and stays as it is

    def loss(self, batch: Any) -> LossOutput:
        self.count += 1
        output = super().loss(batch)
        self.latest = output.loss.detach().clone()
        factor = 1 + torch.rand(()) + self.table[0]
        if self.fails is not None and (error := self.fails(len(batch["x"]), self.calls)) is not None:
            raise error
        return LossOutput(output.loss * factor)


def fresh(fail: Any, micro: int) -> PlacedModel:
    """The same weights and the same generators whatever the arguments are."""
    torch.manual_seed(7)
    model = Careless(fail)
    module = loop.model(model=model, micro=micro)
    torch.manual_seed(5)
    return module


def test_a_step_done_again_is_the_same_step_bit_for_bit() -> None:
    rows: tuple[list[StepRow], ...] = [], []
    retried = fresh(oom_above(8), 32)
    loop.fit(retried, watchers=Watchers(take_rows=rows[0].extend), warmup_steps=0)
    by_hand = fresh(None, 8)
    loop.fit(by_hand, watchers=Watchers(take_rows=rows[1].extend), warmup_steps=0)
    assert retried.micro.tried == [32, 16, 8]
    assert [[row.step for row in each if row.warmup] for each in rows] == [[1], []]  # its time is no figure
    assert retried.model.count == by_hand.model.count
    assert torch.equal(retried.model.latest, by_hand.model.latest)
    assert torch.equal(loop.weights(retried), loop.weights(by_hand))


def test_fifty_steps_with_retries_are_those_without() -> None:
    """SGD, fp32, no dropout."""

    def module(fail: Any) -> PlacedModel:
        made = loop.model(fail=fail)
        made.make_optimizer = lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return made

    def shrinking(size: int, call: int) -> BaseException | None:
        room = 32 if call < 3 else 20 if call < 40 else 10 if call < 90 else 4
        return out_of_memory() if size > room else None

    calm, disturbed = module(None), module(shrinking)
    loop.fit(calm, max_steps=50)
    loop.fit(disturbed, max_steps=50)
    assert disturbed.micro.tried == [32, 16, 8, 4]
    difference = (loop.weights(calm) - loop.weights(disturbed)).norm() / loop.weights(calm).norm()
    assert difference < 1e-5


class LateQueue(tiny.TinyModel):
    """Changes its large buffer from the third step on, and runs out of memory after that."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(2**19))

    def loss(self, batch: Any) -> LossOutput:
        output = super().loss(batch)
        if self.calls >= 3:
            self.queue[0] += 1
            raise out_of_memory()
        return output


def test_a_step_that_changed_a_buffer_without_a_copy_is_not_done_again() -> None:
    placed = loop.model(model=LateQueue())
    with pytest.raises(RestartNeeded, match=r"CUDA out of memory.*changed the buffer LateQueue\.queue") as caught:
        loop.fit(placed, max_steps=4)
    assert (caught.value.changes["memory.micro_batch"], placed.micro.size) == (16, 16)


class OneSample(tiny.TinyModel):
    """Runs out of memory until its blocks recompute their activations."""

    def loss(self, batch: Any) -> LossOutput:
        if not any("forward" in vars(layer) for layer in self.modules()):
            raise out_of_memory()
        return super().loss(batch)


def test_at_one_sample_activations_are_recomputed() -> None:
    events = Notes()
    torch.manual_seed(3)
    module = loop.model(model=OneSample(0.3), micro=2, on_event=events)
    loop.fit(module, max_steps=4)
    torch.manual_seed(3)
    by_hand = loop.model(model=tiny.TinyModel(0.3), micro=1)
    loop.fit(by_hand, max_steps=4)
    assert events.kinds == ["oom", "step_down", "oom", "ladder"]
    assert events.all[-1][1] == {"step": 1, "change": "memory.checkpoint_activations=true"}
    assert torch.equal(loop.weights(module), loop.weights(by_hand))


class WithTable(tiny.TinyData):
    def on_device(self, batch: Any, rng: Any, features: Any) -> Any:
        return {**batch, "x": batch["x"] + features.rows(torch.zeros(len(batch["x"]), dtype=torch.long))}


def with_features(fails: Any, mode: str, events: Any = None, micro: int = 1, **more: Any) -> PlacedModel:
    torch.manual_seed(3)
    rows = torch.linspace(0, 1, 4 * tiny.WIDTH).view(4, tiny.WIDTH)
    return PlacedModel(
        tiny.TinyModel(fail=fails),
        Place(),
        StepOptions(**{"seed": 1, "on_oom": "retry", "feature_mode": mode, **more}),
        train_data=WithTable(),
        eval_data={"val": None, "test": None},
        features=Features(4, rows.nbytes, rows.__getitem__),
        micro=MicroBatches(micro),
        make_optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        lr_factor=lambda step: 1.0,
        on_event=events or (lambda kind, **facts: None),
    )


def test_then_features_leave_the_device() -> None:
    events, calls = Notes(), []

    def fails(size: int, call: int) -> BaseException | None:
        calls.append(call)
        return out_of_memory() if call in (40, 41, 42) else None

    module = with_features(fails, "cache", events)
    loop.fit(module, max_steps=4)
    calm = with_features(None, "cache")
    loop.fit(calm, max_steps=4)
    changes = [facts["change"] for kind, facts in events.all if kind == "ladder"]
    assert changes == ["memory.checkpoint_activations=true", "memory.features=cache_host", "memory.features=dynamic"]
    assert torch.equal(loop.weights(module), loop.weights(calm))


def test_the_end_of_the_ladder_says_what_was_tried_what_is_large_and_what_is_left() -> None:
    module = with_features(lambda size, call: out_of_memory(), "cache_host")
    with pytest.raises(OutOfMemoryExhausted) as caught:
        loop.fit(module, max_steps=4)
    text = str(caught.value)
    assert "micro-batches of 1, then memory.checkpoint_activations=true, then memory.features=dynamic:" in text
    assert "Largest parts: parameters" in text
    assert "Next: gpu.precision=bf16-true (" in text
    assert "memory.features=dynamic (" not in text  # that was tried


def step_of(model: Any, fallbacks: Fallbacks, device: torch.device = CPU) -> TrainStep:
    computation = Computation(model, Loss(model), Preparation(None, 0), Precision("32-true", device.type), device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainStep(computation, optimizer, fallbacks, StepOptions(on_oom="retry"))


def batch_of(size: int) -> Delivery:
    data = tiny.TinyData(size)
    return Delivery({"x": data.inputs, "y": data.targets}, epoch=0, index=0, total=size)


GROWING = [100, 110, 120, 131, 140]
"""Sizes in use, each after some more steps; a list that is not detached adds the same each time."""


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        (GROWING, "by 0.238 MiB a step over 16 steps"),
        ([100, 100, 100, 100, 100], ""),
        ([100, 140, 140, 140, 140], ""),  # a cache has filled
        ([100, 110, 105, 115, 110], ""),
        ([1000, 1001, 1002, 1003, 1004], ""),  # not what fills the memory
        (GROWING[:3], ""),
    ],
)
def test_memory_that_grows_with_every_step_is_recognised(sizes: list[int], says: str) -> None:
    readings = iter(sizes)
    growth = MemoryGrowth(CPU)
    growth._read = lambda: next(readings) * 10**5
    for step in range(1, 4 * len(sizes) + 1):
        growth.note(step)
    assert says in growth.describe()
    assert bool(growth.describe()) == bool(says)


class Keeping(tiny.TinyModel):
    """Keeps 16 MiB of each step, which counts beside a large process too, and runs out of memory in the 24th."""

    def loss(self, batch: Any) -> LossOutput:
        output = super().loss(batch)
        self.kept = [*getattr(self, "kept", []), torch.ones(2**22) + output.loss]
        if self.calls >= 24:
            raise out_of_memory()
        return output


def test_kept_tensors_end_the_run_without_smaller_steps() -> None:
    events = Notes()
    with pytest.raises(OutOfMemoryExhausted) as caught:
        loop.fit(loop.model(model=Keeping(), on_event=events), max_steps=40)
    assert str(caught.value).startswith("Memory grew with every step, by ")
    assert "something keeps tensors of past steps" in str(caught.value)
    assert "with micro-batches of 32: CUDA out of memory" in str(caught.value)
    assert events.kinds == ["oom"]


def test_of_host_memory_the_error_says_so() -> None:
    with pytest.raises(OutOfMemoryExhausted, match="a machine with more memory") as caught:
        loop.fit(loop.model(fail=lambda size, call: MemoryError("no room"), micro=2), max_steps=4)
    assert caught.value.kind == "host_oom"


@pytest.mark.simulated
def test_memory_that_nothing_refers_to_goes_back_to_the_card() -> None:
    """Else a smaller try may find the card full of blocks that it has no use for."""
    device, reserved = torch.device("cuda", 0), []

    class Asking(tiny.TinyModel):
        def loss(self, batch: Any) -> LossOutput:
            reserved.append(torch.cuda.memory_reserved(device))
            torch.empty(2**24, device=device)
            if len(reserved) == 1:
                raise out_of_memory()
            return super().loss(batch)

    step_of(Asking().to(device), Fallbacks(MicroBatches(8)), device)(batch_of(8))
    assert reserved[1] <= reserved[0]
    assert torch.cuda.memory_reserved(device) > reserved[0]


# -- the optimizer ---------------------------------------------------------------------------------------------------


class Fails(torch.optim.SGD):
    """Runs out of memory in its second step, when it has changed the first weight."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        self.calls += 1
        if self.calls == 2:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            raise out_of_memory()
        super().step()
        return loss


def trained(optimizer: Any, events: Any = None, **more: Any) -> PlacedModel:
    module = loop.model(on_event=events, dropout=0.2, **more)
    module.make_optimizer = lambda model: optimizer(model.parameters(), lr=0.05, momentum=0.9)
    loop.fit(module, max_steps=8)
    return module


def test_an_optimizer_that_runs_out_needs_the_last_checkpoint_and_less() -> None:
    events = Notes()
    with pytest.raises(RestartNeeded, match="in the optimizer's step 2, with micro-batches of 32") as caught:
        trained(Fails, events)
    assert (caught.value.changes, caught.value.kind) == ({"memory.micro_batch": 16}, "device_oom")
    assert events.kinds == ["oom", "step_down"]


def test_what_is_only_measured_is_not_restarted() -> None:
    with pytest.raises(OutOfMemoryExhausted, match="in the optimizer's step 2") as caught:
        trained(Fails, may_adapt=False)
    assert not isinstance(caught.value, RestartNeeded)
    assert "Largest parts: parameters" in str(caught.value)
    assert "workload.optimizer.foreach=false" in str(caught.value)


def test_on_oom_fail_ends_with_what_to_type() -> None:
    with pytest.raises(
        OutOfMemoryExhausted, match="in the optimizer's step 2.*Next: gpu.precision=bf16-true"
    ) as caught:
        trained(Fails, on_oom="fail")
    assert not isinstance(caught.value, RestartNeeded)
