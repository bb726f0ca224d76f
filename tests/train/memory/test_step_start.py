import random

import numpy as np
import pytest
import torch
from torch import nn

from wellfed import generators
from wellfed.errors import ModelError
from wellfed.train.memory import step_start
from wellfed.train.memory.step_start import StepStart

CPU = torch.device("cpu")
LARGE = step_start.LARGE_BYTES // 4 + 1


class Buffers(nn.Module):
    """Small and large, changed in every way there is."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("small", torch.zeros(3))
        self.register_buffer("constant", torch.zeros(LARGE))
        self.register_buffer("counted", torch.zeros(LARGE))
        self.register_buffer("uncounted", torch.zeros(LARGE))
        self.register_buffer("replaced", torch.zeros(LARGE))
        self.register_buffer("nothing", None)

    def change(self, by: float) -> None:
        self.norm(torch.randn(4, 3))
        self.small += by
        self.counted += by
        self.uncounted.data.add_(by)
        self.replaced = self.replaced + by


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_buffers_are_put_back_after_any_number_of_steps(steps: int) -> None:
    model = Buffers()
    start = StepStart(model, CPU)
    for step in range(steps):
        start.take()
        model.change(step + 1)
    start.take()
    before = state(model)
    for _ in range(2):  # it may fail more than once
        model.change(100)
        start.restore(repeats=True)
        after = state(model)
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_first_step_that_is_repeated_leaves_no_copy_of_what_stays() -> None:
    model = Buffers()
    start = StepStart(model, CPU)
    start.take()
    model.change(1)
    start.restore(repeats=True)
    model.change(1)
    start.take()
    before = state(model)
    assert {name for _, name in start._constant or ()} == {"constant"}
    model.change(1)
    start.restore(repeats=True)
    assert torch.equal(model.uncounted, before["uncounted"])


def test_a_first_copy_that_runs_out_of_memory_decides_nothing() -> None:
    model = Buffers()
    start = StepStart(model, CPU)
    start._buffers.append((model, "missing"))  # so that the first attempt fails at the end
    with pytest.raises(KeyError):
        start.take()
    start._buffers.pop()
    start.take()
    assert start._constant is None


def test_a_first_step_that_is_left_out_decides_nothing() -> None:
    model = Buffers()
    start = StepStart(model, CPU)
    for _ in range(2):
        start.take()
        model.change(1)
        start.restore(repeats=False)
    start.take()
    assert start._constant is None
    assert torch.equal(model.uncounted, torch.zeros(LARGE))


def test_a_large_buffer_that_stays_as_it_is_has_no_copy() -> None:
    model = Buffers()
    start = StepStart(model, CPU)
    for _ in range(3):
        start.take()
        model.change(1)
    assert {name for _, name in start._constant or ()} == {"constant"}
    assert [copy is None for _, name, _, _, copy in start._saved if name == "constant"] == [True]
    model.constant += 1
    with pytest.raises(ModelError, match=r"changed the buffer Buffers\.constant, which is over 1 MiB"):
        start.restore(repeats=True)


def test_a_large_buffer_without_a_copy_is_not_taken_for_restored() -> None:
    model = Buffers()
    start = StepStart(model, CPU)
    for _ in range(3):
        start.take()
    model.constant = model.constant + 1
    start.restore(repeats=True)
    assert model.constant[0] == 0, "the old tensor is put back"
    model.constant += 1
    with pytest.raises(ModelError, match=r"changed the buffer Buffers\.constant, which is over 1 MiB"):
        start.restore(repeats=True)


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_all_generators() -> None:
    np.random.randn()  # leaves half of a pair for the next call
    random.gauss(0, 1)
    saved = generators.state()
    first = drawn(), np.random.randn(), random.gauss(0, 1)
    generators.restore(saved)
    assert (drawn(), np.random.randn(), random.gauss(0, 1)) == first


def test_torchs_generator_goes_back_to_the_start_of_a_step() -> None:
    start = StepStart(nn.Linear(1, 1), CPU)
    for _ in range(2):
        start.take()
        expected = torch.rand(3)
        start.restore(repeats=True)
        assert torch.equal(torch.rand(3), expected)


@pytest.mark.simulated(cards=2)
def test_the_device_of_this_process_alone() -> None:
    device = torch.device("cuda", 1)
    torch.cuda.init()
    own = generators.state(device)
    assert [len(own["cuda"]), len(generators.state()["cuda"]), len(generators.state(CPU)["cuda"])] == [1, 2, 0]
    drawn_here, drawn_there = torch.rand(3, device=device), torch.rand(3, device="cuda:0")
    generators.restore(own, device)
    assert torch.equal(torch.rand(3, device=device), drawn_here)
    assert not torch.equal(torch.rand(3, device="cuda:0"), drawn_there)
