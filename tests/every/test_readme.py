"""README.md and the pages that open it up are run: commands in a copy of the project, the example, tables against yaml.

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
from typing import Any

import pytest
import yaml

from wellfed import errors
from wellfed.config.compose import compose
from wellfed.process import STOPS, exit_code_of

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
OPTIONS = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
RECORD = (ROOT / "docs" / "record.md").read_text(encoding="utf-8")


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
FILES = [block for block in EXAMPLE if block.path]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the project as a clone would have it, without what the worked example adds."""
    return copy_of_project(tmp_path / "project")


def copy_of_project(copy: Path) -> Path:
    """Copies the project as a clone would have it."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"], capture_output=True, text=True
    )
    names = listed.stdout.splitlines() if listed.returncode == 0 else []
    if names:
        for name in names:
            if (ROOT / name).is_file():  # a file may be deleted and not yet committed
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name)
    else:
        ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "logs", "build", "dist")
        shutil.copytree(ROOT, copy, ignore=ignored)
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


def test_make_commands_exist():
    commands = [line for block in BLOCKS if block.is_make for line in block.text.splitlines()]
    assert commands
    for command in commands:
        done = subprocess.run([*command.split(), "-n"], cwd=ROOT, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr


def rows(head: str, page: str = OPTIONS) -> dict[str, list[str]]:
    """The table whose first column is headed so: first cell -> the other cells, without backticks."""
    found = re.search(rf"^\| {head} \|.*\n\|[-|]+\n((?:\|.*\n)+)", page, flags=re.MULTILINE)
    assert found, head
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in found[1].splitlines()]
    return {row[0].strip("`"): row[1:] for row in cells}


def options(group: str) -> list[str]:
    """The names of a group's options."""
    return [path.stem for path in (ROOT / "configs" / group).glob("*.yaml")]


def knobs_with(group: str, option: str) -> dict[str, Any]:
    """The knobs of a group in a run with that option."""
    return dict(compose([f"{group}={option}"]).resolved[group])


def test_all_groups_and_options_are_listed():
    listed = {group: set(re.findall(r"`(\w+)`", cells[1])) for group, cells in rows("group").items()}
    groups = {path.name for path in (ROOT / "configs").iterdir() if path.is_dir()} - {"hydra"}
    assert set(listed) == groups
    for group in groups:
        there = set(options(group))
        # Workloads are what people add, and theirs need no line in the README.
        assert listed[group] <= there if group == "workload" else listed[group] == there, group


def test_the_loader_table_is_what_a_run_gets():
    (head,) = re.findall(r"^\| loader \| (.*) \|$", OPTIONS, flags=re.MULTILINE)
    names = head.split(" | ")
    table = {
        option: dict(zip(names, map(yaml.safe_load, cells), strict=True)) for option, cells in rows("loader").items()
    }
    runs = {option: knobs_with("loader", option) for option in options("loader")}
    assert table == {option: {name: knobs[name] for name in names} for option, knobs in runs.items()}


def test_all_exit_codes_are_listed():
    listed = {int(code) for codes in rows("exit code", RECORD) for code in codes.split(", ")}
    of_signals = {exit_code_of(signum) for signum in STOPS}
    assert listed == {value for name, value in vars(errors).items() if name.startswith("EXIT_")} | of_signals
