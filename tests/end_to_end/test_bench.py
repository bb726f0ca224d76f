"""``wellfed bench`` with real trainings: a line that makes steps slower is noticed."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.commands import ROOT, environment
from tests.kit.bench_project import git, make_project

QUICK = (
    *("workload=forecast", "gpu=cpu", "logger=none", "telemetry=none", "trainer.max_steps=60"),
    *("trainer.validate_every_steps=1000", "loader.backend=inline", "loader.num_workers=0"),
    *("workload.effective_batch_size=8", "workload.model.hidden_size=8"),
)

LINE = "        forecast_BH, spread_B1 = self._forecast(batch)\n"
"""Of the loss, where a step loses 0.2 s."""


@pytest.mark.slow
def test_a_slower_step_is_noticed(tmp_path: Path) -> None:
    """The engine lies in the project, as in this repository, so either side runs its own."""
    project = make_project(tmp_path / "repository", (ROOT / "src" / "train.py").read_text())
    for package in ("wellfed", "hydra_plugins"):
        shutil.copytree(ROOT / "src" / package, project / "src" / package, ignore=shutil.ignore_patterns("__pycache__"))
    git(project, "add", "--all")
    git(project, "commit", "--quiet", "--message=engine")
    model = project / "src" / "workloads" / "forecast" / "model.py"
    text = model.read_text()
    model.write_text(text.replace(LINE, f"{LINE}        __import__('time').sleep(0.2)\n", 1))
    assert model.read_text() != text
    command = [sys.executable, "-m", "wellfed", "bench", *QUICK, "--against", "HEAD", "--rounds", "3"]
    done = subprocess.run(
        [*command, "--max-slower", "20%"],
        cwd=project,
        env=environment(PYTHONPATH=str(ROOT / "src"), WELLFED_PROJECT=str(project)),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert (done.returncode, done.stderr) == (1, ""), done.stdout
    assert "\nSlower: B takes " in done.stdout
    (path,) = (project / "logs" / "forecast" / "benches").glob("*/bench.json")
    rounds = json.loads(path.read_text())["rounds"]
    assert len(rounds) == 3
    for each in rounds:
        a, b = (json.loads((project / each["runs"][letter] / "run.json").read_text()) for letter in "AB")
        assert a["git"]["commit"] == b["git"]["commit"] == git(project, "rev-parse", "HEAD")
        assert (a["git"]["dirty"], b["git"]["dirty"]) == (False, True)
        assert a["engine"]["within_project"] is b["engine"]["within_project"] is True
        assert each["time_ratio"] > 1.2
    assert len(git(project, "worktree", "list").splitlines()) == 1
