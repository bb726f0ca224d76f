"""Steps before training, run on a CPU with its tensors counted; those on a card are for a machine that has one."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from wellfed.config.compose import compose
from wellfed.observe.hardware.detect import machine
from wellfed.observe.hardware.torch_cuda import torch_cuda
from wellfed.plan.predict.footprint import StepShape, predicted_peak
from wellfed.plan.predict.size_fit import TensorMeter
from wellfed.run.micro_batch import measured_fit as app
from wellfed.run.planner import Planner

SMALL = ("workload.data.scale=0.02", "workload.model.encoder_layers=1", "workload.model.encoder_dim=16", "gpu=8gb")
CPU = torch.device("cpu")


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


def probed(planner, device=CPU, **more):
    """The plan before and after, and the meter."""
    meters = []
    estimate = planner.estimate(planner.rough())
    plan = planner.estimated(estimate)

    def make_meter(step):
        meters.append(More(step, **more))
        return meters[0]

    return plan, app.probed(planner.config, plan, planner.parts, estimate, device, make_meter), meters[0]


@pytest.mark.parametrize(
    "mode", ["cache", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("cache_host", "dynamic"))]
)
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


@pytest.mark.slow
def test_a_feature_table_is_not_filled(planner):
    made = planner("memory.features=cache", "workload.effective_batch_size=64")
    asked = []
    encoder = type(made.parts.model)
    original = encoder.features

    def features(model):
        offered = original(model)
        return replace(offered, rows=lambda indices: asked.append(len(indices)) or offered.rows(indices))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder, "features", features)
        probed(made)
    assert asked == [1]


def test_what_takes_more_than_the_budget_goes_down(planner):
    made = planner("gpu.memory_gib=0.2", "workload.effective_batch_size=1024")
    plan, found, meter = probed(made, times=40.0)
    assert found.memory.micro_batch < plan.memory.micro_batch == 1024
    assert found.knobs["memory.micro_batch"].source == found.knobs["memory.accumulate"].source == "measured"
    assert len(meter.totals) > 1


@pytest.mark.slow
def test_a_copy_of_the_model_that_does_not_fit_is_no_end(planner, monkeypatch):
    def no_room(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    made = planner("workload.effective_batch_size=64")
    estimate = made.estimate(made.rough())
    plan = made.estimated(estimate)
    monkeypatch.setattr(app, "ConfiguredStep", no_room)
    found = app.probed(made.config, plan, made.parts, estimate, CPU)
    assert found.memory.micro_batch == plan.memory.micro_batch
    said = found.memory.reasons["micro_batch"].because
    assert said.endswith("; not tried before training, for which memory did not suffice: CUDA out of memory.")


def test_running_out_of_memory_is_no_end(planner):
    made = planner("workload.effective_batch_size=256")
    _, whole, meter = probed(made)
    _, found, _ = probed(made, memory=0.9 * meter.totals[0])
    assert found.memory.micro_batch < whole.memory.micro_batch
    assert "256 at a time ran out of memory" in found.knobs["memory.micro_batch"].because


def test_a_model_whose_step_fails_leaves_the_plan_as_it_is(planner, monkeypatch):
    made = planner("workload.effective_batch_size=64")
    estimate = made.estimate(made.rough())
    plan = made.estimated(estimate)
    estimate(plan.memory.features, plan.memory.checkpoint_activations)

    def broken(model, batch):
        raise RuntimeError("no")

    monkeypatch.setattr(type(made.parts.model), "loss", broken)
    assert app.probed(made.config, plan, made.parts, estimate, CPU) == plan


def test_training_on_the_cpu_is_not_probed(planner, monkeypatch):
    monkeypatch.setattr("wellfed.run.planner.probed", lambda *_: pytest.fail("was probed"))
    made = planner("workload.effective_batch_size=64")
    assert made.for_training(0).knobs["memory.micro_batch"].source == "predicted"


@pytest.mark.parametrize("words", [(), ("gpu=cpu",)])
def test_tight_memory_takes_a_micro_batch_by_measured_rates(planner, words):
    made = planner("memory=tight", "workload.effective_batch_size=64", *words)
    before = {name: value.clone() for name, value in made.parts.model.state_dict().items()}
    drawn = torch.get_rng_state()
    rough, found = made.rough().knobs["memory.micro_batch"], made.for_training(0)
    micro = found.knobs["memory.micro_batch"]
    assert rough.because.startswith("a quarter of 64 samples")
    assert micro.source == "measured"
    assert "the smallest that keeps 0.8 of the best rate" in micro.because
    assert found.memory.micro_batch * found.memory.accumulate >= 64
    assert all(torch.equal(value, before[name]) for name, value in made.parts.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.slow
def test_typed_micro_batches_and_several_devices_are_not_measured(planner):
    made = planner("memory=tight", "workload.effective_batch_size=64")
    assert (
        "each rank would measure" in made._measured(on_gpu(made.rough(), 2), None).knobs["memory.micro_batch"].because
    )
    typed = planner("memory=tight", "memory.micro_batch=16", "workload.effective_batch_size=64")
    assert typed.for_training(0).knobs["memory.micro_batch"].source == "set"


def on_gpu(plan, devices=1, compile="none"):
    """The plan as one for a card."""
    trainer = replace(plan.trainer, accelerator="gpu", devices=devices)
    return replace(plan, trainer=trainer, device=replace(plan.device, compile=compile))


@pytest.mark.parametrize("words", ["memory.micro_batch=32", "memory.accumulate=2"])
def test_what_was_typed_is_not_probed(planner, words):
    made = planner("workload.effective_batch_size=64", words)
    assert not made._is_open(on_gpu(made.estimated(made.estimate(made.rough()))))


def test_one_card_alone_is_probed_and_else_the_plan_says_why_not(planner, monkeypatch):
    made = planner("workload.effective_batch_size=64")
    plan = made.estimated(made.estimate(made.rough()))
    assert not made._is_open(plan)
    assert made._is_open(on_gpu(plan))
    assert made._untried(on_gpu(plan)) == ""
    assert "each rank would measure for itself" in made._untried(on_gpu(plan, devices=2))
    compiled = on_gpu(plan, compile="default")
    assert "gpu.compile=default would compile twice" in made._untried(compiled)
    monkeypatch.setattr("wellfed.run.planner.probed", lambda *_: pytest.fail("was probed"))
    monkeypatch.setattr(Planner, "_plan", lambda *_, **__: compiled)
    said = made.for_training(0).knobs["memory.micro_batch"]
    assert (said.value, said.source) == (64, "predicted")
    assert said.because.endswith("what it keeps for its graphs is not predicted")


def test_a_run_on_one_card_starts_with_a_probe(planner, monkeypatch):
    made = planner("workload.effective_batch_size=64")
    asked = []

    def on_the_cpu(config, plan, parts, estimate, device):
        asked.append(str(device))
        return app.probed(config, plan, parts, estimate, CPU, More)

    monkeypatch.setattr("wellfed.run.planner.probed", on_the_cpu)
    monkeypatch.setattr(Planner, "_is_open", lambda *_: True)
    assert made.for_training(0).knobs["memory.micro_batch"].source == "measured"
    assert asked == ["cuda:0"]


@pytest.mark.gpu
def test_on_a_card_the_step_is_measured_by_its_allocator(planner):
    made = planner("workload.effective_batch_size=256")
    found = made.for_training(0).knobs["memory.micro_batch"]
    assert (found.value, found.source) == (256, "measured")
    assert torch.cuda.memory_allocated() == pytest.approx(0, abs=64 * 2**20)  # cuBLAS keeps its workspace
    assert torch.cuda.max_memory_reserved() == torch.cuda.memory_reserved()


class Normed(torch.nn.Module):
    """The recommender with BatchNorm before it."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.norm = inner, torch.nn.BatchNorm1d(4)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def loss(self, batch):
        output = self.inner.loss(batch)
        return replace(output, loss=output.loss + 0 * self.norm(torch.ones(2, 4, device=output.loss.device)).sum())


@pytest.mark.slow
def test_batch_norm_is_measured_whole_and_never_goes_down(planner):
    made = planner("workload.effective_batch_size=64")
    made = replace(made, parts=replace(made.parts, model=Normed(made.parts.model)))
    _, found, meter = probed(made)
    micro = found.knobs["memory.micro_batch"]
    assert (micro.value, micro.source, len(meter.totals)) == (64, "measured", 1)
    running = made.parts.model.norm.running_mean.clone()
    _, found, meter = probed(made, times=1e6)
    assert (found.memory.micro_batch, len(meter.totals)) == (64, 1)
    assert "Memory may run out at memory.micro_batch=64" in found.warnings[-1]
    assert made.parts.model.norm.running_mean.equal(running)
