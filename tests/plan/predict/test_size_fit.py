"""Probing with real steps on a CPU, memory counted in tensors."""

import gc

import pytest
import torch
from torch import nn

from wellfed.plan.predict.memory_tracker import MemoryTracker
from wellfed.plan.predict.size_fit import CudaMeter, TensorMeter, find_micro_batch
from wellfed.plan.predict.size_search import LIMIT_FRAC

WIDTH, HIDDEN = 64, 4096
GIB = 2**30


class Step:
    """A perceptron whose activations grow by about 33 KB a sample."""

    def __init__(self, fails_from=None):
        self.model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.fails_from, self.batch, self.calls = fails_from, None, 0

    def sample(self, size):
        self.batch = torch.randn(size, WIDTH)
        return self.batch

    def __call__(self, batch):
        self.calls += 1
        if self.fails_from and len(batch) >= self.fails_from:
            raise RuntimeError("CUDA error: out of memory")
        self.optimizer.zero_grad(set_to_none=True)
        self.model(batch).square().mean().backward()
        self.optimizer.step()

    def resident(self):
        yield from self.model.parameters()
        for state in self.optimizer.state.values():
            yield from state.values()
        yield self.batch


def find(step, **more):
    given = {"budget_gib": 0.02, "max_size": 10_000, "meter": TensorMeter(step.resident)}
    return find_micro_batch(step, step.sample, **{**given, **more})


def test_a_step_is_told_apart_from_the_optimizers_part():
    step = Step()
    meter, batch = TensorMeter(step.resident), step.sample(8)
    step(batch)
    parameters = sum(each.nbytes for each in step.model.parameters())
    small, large = meter.peak(lambda: step(batch)), meter.peak(lambda: step(step.sample(512)))
    assert small.step >= 3 * parameters, "parameters and two moments"
    assert small.total >= small.step
    assert large.total == large.step, "activations are the peak here"
    assert large.step - small.step >= 500 * HIDDEN * 4


def test_the_largest_that_fits_is_found_by_running():
    step = Step()
    found = find(step, budget_gib=0.05, max_size=100_000)
    sizes = {probe.size: probe for probe in found.probes}
    assert sizes[found.size].peak.total <= LIMIT_FRAC * 0.05 * GIB
    assert found.stopped_by == "budget"
    beyond = TensorMeter(step.resident).peak(lambda: step(step.sample(int(found.size * 1.1))))
    assert beyond.total > LIMIT_FRAC * 0.05 * GIB


def test_out_of_memory_is_a_row_and_not_the_end():
    found = find(Step(fails_from=100), budget_gib=1.0)
    assert found.size < 100
    assert any(probe.peak is None for probe in found.probes)


@pytest.mark.parametrize("wrong", [{"budget_gib": 0}, {"budget_gib": -1}, {"max_size": 0}])
def test_impossible_questions_are_refused_before_a_step(wrong):
    step = Step()
    with pytest.raises(ValueError, match="must be above 0"):
        find(step, **wrong)
    assert step.calls == 0


@pytest.mark.slow
def test_a_sample_is_taken_again_and_again_and_memory_is_that_of_all_tensors():
    """As it is called from Python, with nothing said but the budget."""
    step, seen = Step(), []

    def run(batch):
        seen.append({name: tensor.shape for name, tensor in batch.items()})
        step(batch["x"])

    sample = {"x": torch.randn(3, WIDTH), "y": torch.zeros(3)}
    if torch.cuda.is_available():
        pytest.skip("memory is the allocator's then")
    there = MemoryTracker()
    there.note((each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)), "of other tests")
    found = find_micro_batch(run, sample, budget_gib=sum(there.live.values()) / GIB / LIMIT_FRAC + 0.05)
    assert found.size >= 1  # how many depends on what else this process holds, and lets go of meanwhile
    assert seen[0] == {"x": (2, WIDTH), "y": (2,)}
    assert {probe.size for probe in found.probes} == {shapes["y"][0] for shapes in seen}
    parameters = sum(each.nbytes for each in step.model.parameters())
    assert found.probes[0].peak.step >= 3 * parameters


def test_a_sample_that_is_no_batch_is_refused():
    with pytest.raises(TypeError, match="Give a function that makes a batch"):
        find_micro_batch(lambda batch: None, [1, 2], budget_gib=1, meter=TensorMeter(list))


@pytest.mark.gpu
def test_what_a_card_has_is_less_than_all_of_it_and_counts_what_is_held_here():
    device = torch.device("cuda", 0)
    meter = CudaMeter(device)
    before = meter.available_bytes()
    held = torch.empty(2**28, dtype=torch.uint8, device=device)
    assert before < torch.cuda.get_device_properties(device).total_memory
    assert meter.available_bytes() == pytest.approx(before, abs=2**26)
    del held
