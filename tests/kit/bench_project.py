"""A project in a git repository, whose entry script writes the record of a run at once, for tests of benches."""

import shutil
import subprocess
from pathlib import Path

from tests.end_to_end.commands import ROOT

SCRIPT = '''
"""Leaves a run whose rate is that of rate.txt beside this file, times the factors that its overrides name."""

import sys
import time
from pathlib import Path

from wellfed.record.entries import RunRecord
from wellfed.record.provenance import git_state

HERE = Path(__file__).parent
folder = Path(next(word for word in sys.argv if word.startswith("hydra.run.dir=")).partition("=")[2])
noise = 0.001 * int(folder.name[-2]) * (1 if folder.name.endswith("A") else 2)
rate = float((HERE / "rate.txt").read_text()) * (1 + noise)
exec((HERE / "before.txt").read_text())
folder.mkdir(parents=True)
record = RunRecord.start(folder.name)
record.status, record.workload, record.steps = "ok", "forecast", 100
record.machine = {"cpu": "one", "cpu_quota_cores": 2.0}
record.git = git_state(HERE)
record.config = {"workload": {"name": "forecast"}, "words": [word for word in sys.argv[1:] if "hydra" not in word]}
rate *= 0.5 if "loader=conservative" in sys.argv else 1.0
record.throughput = {
    "samples_per_s": rate, "ci95": [0.99 * rate, 1.01 * rate], "steps": 97, "warmup_steps": 3, "sample_unit": "windows"
}
exec((HERE / "after.txt").read_text())
record.write(folder)
print("wrote", folder)
'''


def git(folder: Path, *words: str) -> str:
    """What a git command prints in a folder."""
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    return subprocess.run(
        ["git", "-C", str(folder), *who, *words], capture_output=True, text=True, check=True
    ).stdout.strip()


def make_project(folder: Path, script: str = SCRIPT, within: str = ".") -> Path:
    """Makes a repository with one commit, and the project in a folder of it; returns the project."""
    project = folder / within
    project.mkdir(parents=True)
    shutil.copytree(ROOT / "configs", project / "configs")
    shutil.copytree(ROOT / "src" / "workloads", project / "src" / "workloads")
    (project / "src" / "train.py").write_text(script)
    for name, text in {"rate.txt": "100", "before.txt": "", "after.txt": ""}.items():
        (project / "src" / name).write_text(text)
    (project / ".gitignore").write_text("logs/\n.cache/\n__pycache__/\n")
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message=first")
    return project
