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
        self.register_buffer("edge", torch.zeros(LARGE - 1))
        self.register_buffer("constant", torch.zeros(LARGE))
        self.register_buffer("replaced", torch.zeros(LARGE))
        self.register_buffer("nothing", None)

    def change(self, by: float) -> None:
        self.norm(torch.randn(4, 3))
        self.small += by
        self.edge.data.add_(by)
        self.replaced = self.replaced + by


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize("repeats", [True, False])
def test_buffers_are_put_back_after_any_number_of_steps(steps: int, repeats: bool) -> None:
    model = Buffers()
    start = StepStart(model, CPU)
    for step in range(steps):
        start.take()
        model.change(step + 1)
    start.take()
    before = state(model)
    for _ in range(2):  # it may fail more than once
        model.change(100)
        start.restore(repeats=repeats)
        after = state(model)
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_large_buffer_has_no_copy_and_is_not_taken_for_restored() -> None:
    model = Buffers()
    start = StepStart(model, CPU)
    start.take()
    assert {name for _, name, _, _, copy in start._saved if copy is None} == {"constant", "replaced"}
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
