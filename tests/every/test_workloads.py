"""Every workload that there is, your own among them: planned, trained as typed, described; experiments compose.

What a model and its data promise is tried on a batch of each: `docs/workloads.md` has the promises.
"""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from wellfed.batches import Delivery, num_bytes, tensors
from wellfed.config.compose import compose
from wellfed.config.schema import RunConfig
from wellfed.contract import FEATURE_MODES, Batch, FeatureModeName, FeatureSource
from wellfed.loading.eval_loader import EvalLoader
from wellfed.loading.settings import LoaderSettings
from wellfed.memory.features import hold
from wellfed.run import assemble
from wellfed.run.planner import plan_without_running
from wellfed.sample_rng import SampleRng
from wellfed.step.micro_batches import Preparation
from wellfed.step.train_step import parameter_groups

ROOT = Path(__file__).parents[2]
WORKLOADS = sorted(path.stem for path in (ROOT / "configs" / "workload").glob("*.yaml"))
EXPERIMENTS = sorted(path.stem for path in (ROOT / "configs" / "experiment").glob("*.yaml"))
CPU = torch.device("cpu")
SAMPLES = 8
"""Of a batch that is looked at."""
SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Made:
    """A workload as its yaml has it."""

    config: RunConfig
    parts: assemble.Parts

    @property
    def modes(self) -> tuple[FeatureModeName | None, ...]:
        """Of features, those that are right; None where there are no features."""
        features = self.parts.features
        return (None,) if features is None else ("dynamic",) if features.trainable else FEATURE_MODES

    def source(self, mode: FeatureModeName | None) -> FeatureSource | None:
        features = self.parts.features
        return None if features is None or mode is None else hold(features, mode, CPU)

    def first_batch(self, mode: FeatureModeName | None) -> Delivery:
        """As training gets it."""
        data = assemble.for_features(self.parts, mode).data
        loader = assemble.make_train_loader(self.config, LoaderSettings(), data, batch_size=SAMPLES)
        found = next(iter(loader))
        loader.close()
        return found

    def preparation(self, mode: FeatureModeName | None, split: str = "train") -> Preparation:
        data = assemble.for_features(self.parts, mode).data
        return Preparation(getattr(data, split), self.config.seed, self.parts.model)

    def prepared(self, mode: FeatureModeName | None) -> Batch:
        """The first batch as the model sees it."""
        delivery = self.first_batch(mode)
        return self.preparation(mode)(delivery.batch, delivery, 0, self.source(mode))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """Each is made once: ``made(workload)``."""
    known: dict[str, Made] = {}
    folder = tmp_path_factory.mktemp("workloads")

    def make(workload: str) -> Made:
        if workload not in known:
            config = compose([f"workload={workload}", "gpu=cpu", "logger=none", f"paths.cache_dir={folder}"]).config
            known[workload] = Made(config, assemble.make_parts(config))
        if known[workload].parts.is_lightning_module:
            pytest.skip("a LightningModule runs its own step")
        return known[workload]

    return make


def values(batch: Batch) -> list[Tensor]:
    return list(tensors(batch))


def assert_same(one: Batch, other: Batch, tolerance: float = 0.0) -> None:
    assert len(values(one)) == len(values(other)) > 0
    for left, right in zip(values(one), values(other), strict=True):
        assert (left.shape, left.dtype) == (right.shape, right.dtype)
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance, equal_nan=True)


def is_finite(gradient: Tensor) -> bool:
    return bool((gradient.coalesce().values() if gradient.is_sparse else gradient).isfinite().all())


# -- as typed -------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # the main command as typed stays in make test
@pytest.mark.parametrize("workload", WORKLOADS)
def test_it_trains_and_is_evaluated(workload: str, tmp_path: Path):
    quick = ("gpu=cpu", "trainer.max_steps=2", "logger=none", "telemetry=none", f"hydra.run.dir={tmp_path}/run")
    done = subprocess.run(
        [sys.executable, str(ROOT / "src" / "train.py"), f"workload={workload}", *quick],
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if not key.startswith("HYDRA_")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["status"], record["workload"], record["steps"]) == ("ok", workload, 2)
    assert "train" in {name.partition("/")[0] for name in record["metrics"]}
    assert all(math.isfinite(value) for value in record["metrics"].values()), record["metrics"]


@pytest.mark.slow  # an LSTM of 90 steps takes a quarter of a minute to rehearse
@pytest.mark.parametrize("workload", WORKLOADS)
def test_it_is_planned(workload: str):
    found = plan_without_running(compose([f"workload={workload}", "gpu=cpu"]))
    assert found.plan.misfit is None
    assert found.workload == workload


@pytest.mark.parametrize("workload", WORKLOADS)
def test_it_has_a_card(workload: str):
    options = yaml.safe_load((ROOT / "configs" / "workload" / f"{workload}.yaml").read_text())
    assert options["name"] == workload
    folder = ROOT.joinpath("src", *options["model"]["_target_"].split(".")[:-2])
    assert (folder / "README.md").read_text(encoding="utf-8").startswith(f"# {workload}")


@pytest.mark.parametrize("experiment", [None, *EXPERIMENTS])
def test_every_experiment_composes(experiment: str | None):
    choices = compose([] if experiment is None else [f"experiment={experiment}"]).choices
    assert choices.get("experiment") == experiment
    assert choices["workload"] in WORKLOADS


# -- what a model and its data promise ------------------------------------------------------------------------------


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_step_moves_what_is_trained(workload: str, made: Callable[[str], Made]):
    one = made(workload)
    model, delivery = copy.deepcopy(one.parts.model).train(), one.first_batch(one.modes[0])
    has_own_split = callable(getattr(one.parts.data.train, "split", None))
    assert delivery.size == SAMPLES
    assert has_own_split or {len(each) for each in values(delivery.batch)} == {SAMPLES}
    batch = one.prepared(one.modes[0])
    assert has_own_split or {len(each) for each in values(batch)} == {SAMPLES}
    plan: Any = SimpleNamespace(device=SimpleNamespace(precision="32-true"))
    sparse = one.parts.has_sparse_gradients
    optimizer = assemble.make_optimizer(one.config, plan, parameter_groups(model), sparse=sparse)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}

    for _ in range(2):  # what begins at 0 keeps the gradient from others in the first
        found = model.loss(batch)
        assert (found.loss.shape, bool(found.loss.isfinite())) == ((), True)
        for name, value in found.metrics.items():
            assert (value.shape, bool(value.isfinite())) == ((), True), name
        optimizer.zero_grad()
        found.loss.backward()
        optimizer.step()

    trained = {name for name, weight in model.named_parameters() if weight.grad is not None}
    assert all(is_finite(model.get_parameter(name).grad) for name in trained)
    moved = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    assert trained
    assert moved <= trained
    assert len(moved) > len(trained) // 2  # some may have a gradient of 0 still


@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_loss_of_a_batch_is_the_mean_of_its_parts(workload: str, made: Callable[[str], Made]):
    one = made(workload)
    mode = one.modes[0]
    model, delivery = copy.deepcopy(one.parts.model).eval(), one.first_batch(mode)
    prepare, sizes = one.preparation(mode), [3, SAMPLES - 3]
    with torch.no_grad():
        batch = prepare(delivery.batch, delivery, 0, one.source(mode))  # parts of it: each would draw by itself
        whole, parts = model.loss(batch).loss, prepare.split(batch, sizes)
        weights = [prepare.weight(part, size) for part, size in zip(parts, sizes, strict=True)]
        losses = [model.loss(part).loss for part in parts]
    mean = sum(weight * loss for weight, loss in zip(weights, losses, strict=True)) / sum(weights)
    torch.testing.assert_close(mean, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_batch_is_the_same_again(workload: str, made: Callable[[str], Made]):
    """Randomness is a function of seed, epoch and position."""
    one = made(workload)
    assert_same(one.prepared(one.modes[0]), one.prepared(one.modes[0]))


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_batch_is_the_same_however_it_is_cut(workload: str, made: Callable[[str], Made]):
    """Micro-batches are a matter of memory: what augmentation draws belongs to the sample."""
    one = made(workload)
    mode = one.modes[0]
    prepare, delivery, source = one.preparation(mode), one.first_batch(mode), one.source(mode)
    if callable(getattr(one.parts.data.train, "split", None)):
        pytest.skip("the data cuts its batches itself")
    whole = values(prepare(delivery.batch, delivery, 0, source))
    parts = prepare.split(delivery.batch, [3, SAMPLES - 3])
    cut = [values(prepare(part, delivery, number, source)) for number, part in enumerate(parts)]
    for tensor, first, second in zip(whole, *cut, strict=True):
        torch.testing.assert_close(torch.cat([first, second]), tensor, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_features_are_the_same_wherever_they_are_held(workload: str, made: Callable[[str], Made]):
    one = made(workload)
    if one.modes == (None,):
        pytest.skip("it has no features")
    model = copy.deepcopy(one.parts.model).eval()
    found = {mode: one.prepared(mode) for mode in one.modes}
    with torch.no_grad():
        losses = {mode: model.loss(batch).loss for mode, batch in found.items()}
    for mode in one.modes:
        assert_same(found[mode], found["dynamic"], 1e-5)
        torch.testing.assert_close(losses[mode], losses["dynamic"], rtol=1e-5, atol=1e-5)
    if one.parts.data.features is not None:
        sent = {mode: num_bytes(one.first_batch(mode).batch) for mode in one.modes}
        assert sent["cache"] < min(sent["cache_host"], sent["dynamic"]), "in cache a batch is indices alone"
    # A batch of another mode stays right: a step that ran out of memory goes on with the next one.
    early, source = one.first_batch("cache"), one.source("dynamic")
    assert_same(one.preparation("cache")(early.batch, early, 0, source), found["dynamic"], 1e-5)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_rows_are_cut_as_they_are_read(workload: str, made: Callable[[str], Made]):
    one = made(workload)
    features = one.parts.data.features
    if features is None or features.store is None:
        pytest.skip("it has no rows that overlap")
    assert features.cut is not None
    store = features.store()
    assert (store.device, store.nbytes) == (CPU, features.bytes)
    last = features.num_rows - 1
    indices = torch.tensor([0, last, last // 2, 0, 1])
    assert torch.equal(features.cut(store, indices), features.rows(indices))
    assert features.cut(store, indices[:0]).shape[0] == 0


@pytest.mark.parametrize("workload", WORKLOADS)
def test_its_data_can_be_sent_to_a_process(workload: str, made: Callable[[str], Made]):
    one = made(workload)
    for mode in one.modes:
        data = assemble.for_features(one.parts, mode).data
        for split in (getattr(data, name) for name in SPLITS if getattr(data, name) is not None):
            again = pickle.loads(pickle.dumps(split))
            assert len(again) == len(split)
            indices = torch.arange(min(3, len(split)))
            if callable(getattr(split, "fetch", None)):
                assert_same(*(each.fetch(indices, SampleRng(1, 0)) for each in (again, split)))


@pytest.mark.parametrize("workload", WORKLOADS)
def test_its_evaluation_is_additive(workload: str, made: Callable[[str], Made]):
    one = made(workload)
    mode, evaluation = one.modes[0], one.parts.data.evaluation
    if not hasattr(evaluation, "best_metric"):
        pytest.skip("it has no evaluation of its own")
    val = assemble.for_features(one.parts, mode).data.val
    collate = assemble.of_split(one.parts.data.eval_collate, "val") or one.parts.data.collate
    loader = EvalLoader(val, SAMPLES, seed=1, collate=collate, settings=LoaderSettings(), limit_batches=2)
    deliveries = list(loader)
    model, prepare, source = copy.deepcopy(one.parts.model).eval(), one.preparation(mode, "val"), one.source(mode)
    found = []
    for sizes in ([SAMPLES], [3, 5], [1] * SAMPLES):
        evaluation.reset()
        for delivery in deliveries:
            parts = prepare.split(delivery.batch, sizes if delivery.size == SAMPLES else [delivery.size])
            for part in parts:
                with torch.no_grad():
                    batch = prepare(part, delivery, 0, source)
                    evaluation.update(model, batch, *([] if source is None else [source]))
        found.append(evaluation.compute())
    evaluation.reset()
    assert evaluation.best_metric in found[0]
    assert all(math.isfinite(value) for value in found[0].values()), found[0]
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-4, abs=1e-5)
