"""Every workload that there is, your own among them: planned, trained as typed, described; experiments compose."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from wellfed.config.compose import compose
from wellfed.run.planner import plan_without_running

ROOT = Path(__file__).parents[2]
WORKLOADS = sorted(path.stem for path in (ROOT / "configs" / "workload").glob("*.yaml"))
EXPERIMENTS = sorted(path.stem for path in (ROOT / "configs" / "experiment").glob("*.yaml"))


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
