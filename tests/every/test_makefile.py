"""Targets of the Makefile: what they type, and an installation that was interrupted."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TARGETS = re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)


def make(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "LC_ALL": "C", **environment},
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_every_target_can_be_made_and_is_in_the_help():
    assert {"help", "install", "train", "test", "check"} <= set(TARGETS)
    assert [target for target in TARGETS if make("-n", target).returncode] == []
    listed = re.findall(r"^  make ([\w-]+) +\S", make().stdout, flags=re.MULTILINE)
    assert sorted(listed) == sorted(TARGETS)


@pytest.mark.parametrize(
    ("words", "environment", "typed"),
    [
        (
            ["W=recsys", "gpu=24gb", "loader=aggressive", "memory=cache", "ARGS=seed=2 +x.y=1"],
            {},
            "src/train.py workload=recsys gpu=24gb loader=aggressive memory=cache seed=2 +x.y=1",
        ),
        (
            ["SIMULATED=24gb --slowdown 3", "gpu=8gb"],
            {},
            "python tools/simulated.py 24gb --slowdown 3 -- .venv/bin/python src/train.py gpu=8gb",
        ),
        ([], {"gpu": "24gb", "W": "recsys", "SIMULATED": "24gb"}, ".venv/bin/python src/train.py"),
    ],
    ids=["handed on", "simulated", "of the environment"],
)
def test_choices_of_the_command_line_count(words: list[str], environment: dict[str, str], typed: str):
    last = make("-n", "train", *words, **environment).stdout.splitlines()[-1].strip()
    assert last.endswith(typed)
    assert ("simulated" in last) == ("simulated" in typed)


def script(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("python", "message"),
    [("no-such-python", "Install Python 3.11 or newer"), ("old-python", "3.11 or newer is needed")],
)
def test_a_python_that_will_not_do_is_told(tmp_path: Path, python: str, message: str):
    script(tmp_path / "old-python", 'test "$1" = -V && echo Python 3.8.0; exit 1')
    name = python if python.startswith("no-") else str(tmp_path / python)
    done = make("install", f"PYTHON={name}", f"VENV={tmp_path / 'venv'}")
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "venv").exists()


def test_an_interrupted_installation_is_done_again(tmp_path: Path):
    """pip fails once, then works: the second `make` installs, the third has nothing to do."""
    copy, calls = tmp_path / "project", tmp_path / "calls"
    copy.mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, copy)
    script(
        tmp_path / "venv-python",
        f'case "$*" in *"pip install"*"-e "*) echo "$*" | sed "s/.* -e //" >> {calls}; '
        f'test "$(wc -l < {calls})" -gt 1;; esac',
    )
    script(
        tmp_path / "python",
        f'case "$*" in "-m venv"*) mkdir -p .venv/bin && cp {tmp_path}/venv-python .venv/bin/python;; '
        f'*) exec {sys.executable} "$@";; esac',
    )

    def made(target: str) -> int:
        command = ["make", target, f"PYTHON={tmp_path / 'python'}"]
        return subprocess.run(command, cwd=copy, capture_output=True, timeout=30).returncode

    assert [made("train") for _ in range(3)] == [2, 0, 0]
    assert calls.read_text().split() == [".[examples]", ".[examples]"]
    assert [made("install") for _ in range(2)] == [0, 0]
    assert calls.read_text().split()[2:] == [".[dev,search]"]
