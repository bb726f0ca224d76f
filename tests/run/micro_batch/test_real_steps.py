"""Steps before training, run on a CPU with its tensors counted; those on a card are for a machine that has one."""

import random
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch

from tests.kit.few import slow
from wellfed.config.compose import compose
from wellfed.observe.hardware.detect import machine
from wellfed.observe.hardware.torch_cuda import torch_cuda
from wellfed.plan.predict.peak import StepShape, predicted_peak
from wellfed.plan.predict.size_fit import TensorMeter
from wellfed.run.micro_batch import real_steps as app
from wellfed.run.planner import Planner

SMALL = ("workload.data.scale=0.02", "workload.model.encoder_layers=1", "workload.model.encoder_dim=16", "gpu=8gb")


class More(TensorMeter):
    """Counts tensors, and a share of them once more; beyond ``memory`` there is none."""

    def __init__(self, step, times=1.0, memory=None):
        super().__init__(step.resident)
        self.times, self.memory, self.totals = times, memory, []

    def peak(self, step):
        found = super().peak(step)
        total = int(self.times * found.total)
        if self.memory and total > self.memory:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.totals.append(total)
        return replace(found, total=total)


@pytest.fixture
def planner(tmp_path):
    def made(*words):
        composed = compose([*SMALL, *words, f"paths.cache_dir={tmp_path}"])
        facts = machine(torch_cuda())
        return Planner.start(composed, facts)

    return made


def probed(planner, **more):
    """The plan before and after, and the meter."""
    meters = []
    estimate = planner.estimate(planner.rough())
    plan = planner.estimated(estimate)

    def make_meter(step):
        meters.append(More(step, **more))
        return meters[0]

    return plan, app.measured(planner.config, plan, planner.parts, estimate, make_meter), meters[0]


@pytest.mark.parametrize("mode", ["cache", *map(slow, ("cache_host", "dynamic"))])
def test_a_step_is_measured_and_nothing_is_changed(planner, mode, monkeypatch):
    made = planner(f"memory.features={mode}", "workload.effective_batch_size=64")
    loss = type(made.parts.model).loss

    def drawing(model, batch):
        random.random(), np.random.rand(), torch.rand(1)
        return loss(model, batch)

    monkeypatch.setattr(type(made.parts.model), "loss", drawing)
    before = {name: value.clone() for name, value in made.parts.model.state_dict().items()}
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    plan, found, meter = probed(made)
    micro = found.knobs["memory.micro_batch"]
    assert (micro.value, micro.source) == (64, "measured")
    assert "; a step of 64 alone took " in micro.because
    footprint = replace(made.estimate(plan)(mode, False), filling=0)
    assert meter.totals == [pytest.approx(predicted_peak(footprint, 64, StepShape(64)).tensor_bytes, rel=0.02)]
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[:2]
    assert torch.equal(torch.get_rng_state(), states[2])
    after = made.parts.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None for parameter in made.parts.model.parameters())


def test_what_takes_more_than_the_budget_goes_down(planner):
    made = planner("gpu.memory_gib=0.2", "workload.effective_batch_size=1024")
    plan, found, meter = probed(made, times=60.0)
    assert found.memory.micro_batch < plan.memory.micro_batch == 1024
    assert found.knobs["memory.micro_batch"].source == found.knobs["memory.accumulate"].source == "measured"
    assert len(meter.totals) > 1


@pytest.mark.slow
def test_running_out_of_memory_is_no_end(planner):
    made = planner("workload.effective_batch_size=256")
    _, whole, meter = probed(made)
    _, found, _ = probed(made, memory=0.9 * meter.totals[0])
    assert found.memory.micro_batch < whole.memory.micro_batch
    assert "256 at a time ran out of memory" in found.knobs["memory.micro_batch"].because


@pytest.mark.slow  # tests/plan/predict/test_size_fit.py
@pytest.mark.gpu
def test_on_a_card_the_step_is_measured_by_its_allocator(planner):
    made = planner("workload.effective_batch_size=256")
    found = made.for_training(0).knobs["memory.micro_batch"]
    assert (found.value, found.source) == (256, "measured")
    assert torch.cuda.memory_allocated() <= 96 * 2**20  # cuBLAS keeps a workspace for each of two threads: 65 MiB
    assert torch.cuda.max_memory_reserved() == torch.cuda.memory_reserved()
    assert not torch.cuda.memory_reserved() or torch.cuda.memory_allocated(), "cached segments went back to the driver"


class Imaged(torch.nn.Module):
    """The recommender with a convolution, and with notes of what a step is run with."""

    seen: ClassVar[list] = []

    def __init__(self, inner):
        super().__init__()
        self.inner, self.conv = inner, torch.nn.Conv2d(2, 4, 3)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def loss(self, batch):
        backends = torch.backends.cudnn
        is_nhwc = self.conv.weight.is_contiguous(memory_format=torch.channels_last)
        self.seen.append((is_nhwc, torch.get_float32_matmul_precision(), backends.allow_tf32, backends.benchmark))
        output = self.inner.loss(batch)
        return replace(output, loss=output.loss + 0 * self.conv.weight.sum())


@pytest.mark.slow
@pytest.mark.simulated
def test_a_step_is_run_with_the_settings_of_training(planner):
    words = "gpu.channels_last=true", "gpu.cudnn_benchmark=true", "gpu.tf32=false"
    made = planner("workload.effective_batch_size=64", *words)
    Imaged.seen.clear()
    made = replace(made, parts=replace(made.parts, model=Imaged(made.parts.model)))
    assert made.for_training(0).knobs["memory.micro_batch"].source == "measured"
    assert Imaged.seen[-1] == (True, "highest", False, True)
    assert {each[1:] for each in Imaged.seen} == {("highest", False, True)}  # a rehearsal keeps the memory format
