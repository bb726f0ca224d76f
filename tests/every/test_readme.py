"""README.md and the pages that open it up are run: commands in a copy of the project, and the example.

Blocks are fenced as ``bash`` (run), ``text`` (what a command shows) or ``<language> <path>`` (a file of the example).
The page of the example is followed from its first block to its last. Every other block starts anew.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
OPTIONS = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    language: str
    path: str
    text: str

    @property
    def is_make(self) -> bool:
        """Whether all its lines are make's. Each would install a .venv, which takes minutes: .ci/run and CI do that."""
        return self.language == "bash" and all(line.startswith(("make ", "#")) for line in self.text.splitlines())


def blocks(text: str) -> list[Block]:
    found = re.findall(r"^```(\w+)(?: +(\S+))?\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [Block(*match) for match in found]


BLOCKS = blocks(README) + blocks(OPTIONS)
EXAMPLE = blocks((ROOT / "docs" / "first_workload.md").read_text(encoding="utf-8"))
RUN = [block for block in BLOCKS if block.language == "bash" and not block.is_make]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the project as a clone would have it, without what the worked example adds."""
    return copy_of_project(tmp_path / "project")


def copy_of_project(copy: Path) -> Path:
    """Copies the project as a clone would have it."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"], capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():  # a file may be deleted and not yet committed
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    shutil.rmtree(copy / "src" / "workloads" / "mine", ignore_errors=True)  # there may be one of that name
    (copy / "configs" / "workload" / "mine.yaml").unlink(missing_ok=True)
    return copy


def edit(block: Block, project: Path) -> None:
    """Replaces a file that exists already by the block."""
    assert (project / block.path).is_file(), f"the example edits what is not there: {block.path}"
    (project / block.path).write_text(block.text, encoding="utf-8")


def run(command: str, project: Path, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    """Runs a command as typed in the copy, where ``python`` is the Python of the tests."""
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=project,
        env=environment_of(project, project.parent / "bin"),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def environment_of(project: Path, programs: Path) -> dict[str, str]:
    """Variables for commands typed in a project; ``programs`` gets a ``python``, which is that of the tests."""
    programs.mkdir(exist_ok=True)
    (programs / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n', encoding="utf-8")
    (programs / "python").chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB_", "HYDRA_"))}
    return environment | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(project / "src"),
        "WELLFED_PROJECT": "",
        "WANDB_MODE": "offline",
        "OMP_NUM_THREADS": "1",
    }


@pytest.mark.slow
@pytest.mark.parametrize("block", RUN, ids=lambda block: block.text.splitlines()[0])
def test_commands_run(block: Block, project: Path):
    done = run(block.text, project)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    records = [json.loads(path.read_text()) for path in project.glob("logs/**/run.json")]
    assert bool(records) == ("src/train.py" in block.text)
    assert {record["status"] for record in records} <= {"ok"}


@pytest.mark.slow
def test_the_example_is_followed_to_the_letter(project: Path):
    for block in EXAMPLE:
        if block.path:
            edit(block, project)
        else:
            done = run(block.text, project)
            assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    files = sorted(project.glob("logs/mine/**/run.json"), key=lambda path: path.stat().st_mtime)
    records = [json.loads(path.read_text()) for path in files]
    assert [(record["status"], record["steps"]) for record in records] == [("ok", 50), ("ok", 20), ("ok", 20)]
    added, *own = records
    assert added["metrics"]["test/accuracy"] > 0.5
    assert [record["config"]["workload"]["model"]["hidden"] for record in own] == [32, 128]
    assert all({"train/mae", "test/loss"} < set(record["metrics"]) for record in own)
