"""The example workloads: a slow start to compare with, a smoke run that learns, the same loss under any option."""

import math
import os
import time
from pathlib import Path

import pytest

from tests.end_to_end.commands import record_of, run
from tests.kit.few import few
from wellfed.config.compose import compose

ROOT = Path(__file__).parents[2]
LONGEST_S = 60
BEATS = {
    "forecast": lambda test: test["test/mase_seasonal_naive"] - test["test/mase"],
    "hyperspectral": lambda test: test["test/kappa"],  # 0 = what chance would give
    "recsys": lambda test: test["test/recall_at_10"] - 2 * 10 / 600,  # items drawn at random
    "restoration": lambda test: test["test/psnr"] - test["test/psnr_degraded"] - 1,
    "speech": lambda test: test["test/accuracy"] - 0.5,
}
"""By how much a smoke run is better than what needs no learning; above 0."""


@pytest.mark.parametrize("workload", few([*BEATS], 2))
def test_it_has_a_slow_start(workload: str):
    composed = compose([f"experiment={workload}_starved"])
    assert composed.choices["workload"] == workload
    fed = compose([f"workload={workload}"])
    assert composed.config != fed.config


@pytest.mark.slow
@pytest.mark.parametrize("workload", BEATS)
def test_a_smoke_run_learns_within_a_minute(workload: str, tmp_path: Path):
    begun = time.monotonic()
    words = (f"workload={workload}", "gpu=cpu", "trainer=smoke", "logger=none", "hydra.run.dir=run")
    done = run("train.py", *words, cwd=tmp_path, fresh=True)
    took_s = time.monotonic() - begun
    assert done.code == 0, done.text
    record = record_of(tmp_path / "run")
    assert (record["status"], record["workload"]) == ("ok", workload)
    better_by = BEATS[workload](record["metrics"])
    assert math.isfinite(better_by)
    assert better_by > 0, record["metrics"]
    others = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))  # a machine that others use, too
    assert took_s < LONGEST_S * others, took_s


GROUPS = ("gpu", "loader", "memory")
OPTIONS = {
    group: [stem for stem in sorted(path.stem for path in (ROOT / "configs" / group).glob("*.yaml")) if stem != "own"]
    for group in GROUPS
}
"""Option names by group; ``loader=own`` needs a DataLoader of the workload's."""


@pytest.mark.slow
@pytest.mark.parametrize("workload", BEATS)
def test_every_option_trains_the_same(workload: str, tmp_path: Path):
    """Dropout draws its masks by micro-batch, so it is off."""
    off = ["workload.model.dropout=0.0"] if "dropout" in compose([f"workload={workload}"]).config.workload.model else []
    quick = ("trainer.max_steps=2", "trainer.limit_batches=2", "logger=none", "telemetry=none", "paths.cache_dir=kept")
    losses = {}
    for number in range(max(map(len, OPTIONS.values()))):
        chosen = {group: options[number % len(options)] for group, options in OPTIONS.items()}
        words = [f"{group}={option}" for group, option in chosen.items()]
        folder = f"run{number}"
        done = run("train.py", f"workload={workload}", *words, *off, *quick, f"hydra.run.dir={folder}", cwd=tmp_path)
        assert done.code == 0, done.text
        record = record_of(tmp_path / folder)
        planned = record["plan"]["memory.features"]["value"]
        if planned is not None and chosen["memory"] in ("cache", "cache_host", "dynamic"):
            assert planned == chosen["memory"]
        losses[" ".join(words)] = record["metrics"]["train/loss"]
    assert losses == pytest.approx(dict.fromkeys(losses, next(iter(losses.values()))), rel=1e-4)
