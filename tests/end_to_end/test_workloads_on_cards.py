"""Every workload on a simulated card in each mode of features: a run, its numbers, what it was predicted to need."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.memory_cases import cuda_peak, estimated, workload_case
from tests.end_to_end.commands import record_of, run
from tests.fake_cuda.machine import FakeCuda
from wellfed.config.compose import compose
from wellfed.contract import FeatureModeName
from wellfed.plan.predict.peak import Footprint, StepShape, predicted_peak
from wellfed.run.objects.assemble import make_objects

CONFIGS = Path(__file__).parents[2] / "configs"
WORKLOADS = sorted(path.stem for path in (CONFIGS / "workload").glob("*.yaml"))
MODES: tuple[FeatureModeName, ...] = ("cache", "cache_host", "dynamic")
STEPS = ("trainer.max_steps=3", "trainer.limit_batches=2", "logger=none", "telemetry.ceiling_steps=0")


def run_on_card(workload: str, mode: str, folder: Path, fake_cuda: FakeCuda) -> dict[str, Any]:
    """The record of three steps."""
    cards = fake_cuda.environment(mib=8192, report=folder / "report")
    words = (f"workload={workload}", f"memory={mode}", "gpu=8gb", *STEPS)
    done = run("train.py", *words, "hydra.run.dir=run", cwd=folder, **cards)
    assert done.code == 0, done.text
    reports = [json.loads(line) for line in (folder / "report").read_text().splitlines()]
    assert [violation for report in reports for violation in report["violations"]] == []
    assert any(report["launches"] for report in reports)
    return dict(record_of(folder / "run"))


@pytest.mark.slow
@pytest.mark.parametrize("workload", WORKLOADS)
def test_it_learns_the_same_on_a_card_wherever_features_are(workload: str, tmp_path: Path, fake_cuda: FakeCuda):
    losses = {}
    for mode in MODES:
        folder = tmp_path / mode
        folder.mkdir()
        record = run_on_card(workload, mode, folder, fake_cuda)
        assert (record["status"], record["steps"]) == ("ok", 3)
        assert record["plan"]["memory.features"]["value"] in (mode, None)  # None: it has no features
        assert 0 < record["memory"]["predicted_peak_gib"] < record["memory"]["budget_gib"]
        assert 0 < record["memory"]["measured_peak_gib"] < record["memory"]["budget_gib"]
        losses[mode] = record["metrics"]["train/loss"]
    assert losses == dict.fromkeys(MODES, pytest.approx(losses["dynamic"], rel=1e-5))


@pytest.mark.slow
@pytest.mark.simulated(mib=8192)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_what_it_needs_of_a_card_was_predicted(workload: str, mode: FeatureModeName, tmp_path: Path):
    """In a split step, beside what the data keep on the card from their first batch on (a bank of noise)."""
    torch.manual_seed(0)
    torch.backends.mha.set_fastpath_enabled(False)  # a simulated card does not see inside fused layers
    config = compose([f"workload={workload}", "gpu=cpu", "logger=none", f"paths.cache_dir={tmp_path}"]).config
    parts, samples = make_objects(config), config.workload.samples_per_step
    part = max(1, samples // 4)
    case = workload_case(config, parts, (part, samples), None if parts.features is None else mode)
    cuda_peak(case, part, samples)
    gc.collect()
    kept = torch.cuda.memory_allocated()
    needed, _ = cuda_peak(case, part, samples)
    found = estimated(case, samples, block_bytes=1)
    assert isinstance(found, Footprint), found
    predicted = predicted_peak(found, part, StepShape(samples)).tensor_bytes
    assert 0.98 * needed < predicted < 1.2 * needed + kept
