import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUNS = ".[examples]"
"""What pip is asked for before a run."""
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


def test_targets_are_found():
    assert {"help", "install", "train", "test", "check"} <= set(TARGETS)


@pytest.mark.parametrize("arguments", [[], ["help"]])
def test_help_is_the_default_and_lists_every_target_once(arguments: list[str]):
    done = make(*arguments)
    assert done.returncode == 0
    listed = re.findall(r"^  make ([\w-]+) +\S", done.stdout, flags=re.MULTILINE)
    assert sorted(listed) == sorted(TARGETS)


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_can_be_made(target: str):
    done = make("-n", target)
    assert done.returncode == 0, done.stderr


def command_of_train(*arguments: str, **environment: str) -> str:
    return make("-n", "train", *arguments, **environment).stdout.splitlines()[-1].strip()


def test_choices_are_handed_on():
    typed = command_of_train("W=recsys", "gpu=24gb", "loader=aggressive", "memory=cache", "ARGS=seed=2 +x.y=1")
    assert typed.endswith("src/train.py workload=recsys gpu=24gb loader=aggressive memory=cache seed=2 +x.y=1")


def test_a_tune_is_given_the_same():
    done = make("-n", "tune", "W=recsys", "gpu=24gb", "ARGS=tune.rounds=3", "SIMULATED=24gb")
    words = "python tools/simulated.py 24gb -- .venv/bin/python src/tune.py workload=recsys gpu=24gb tune.rounds=3"
    assert done.stdout.splitlines()[-1].strip().endswith(words)


def test_choices_come_from_the_command_line_only():
    typed = command_of_train(gpu="24gb", memory="cache", W="recsys", SIMULATED="24gb")
    assert typed.endswith("src/train.py")
    assert "simulated" not in typed


def test_a_simulated_card_is_put_below_the_training():
    typed = command_of_train("SIMULATED=24gb --slowdown 3", "gpu=8gb")
    assert typed.endswith("python tools/simulated.py 24gb --slowdown 3 -- .venv/bin/python src/train.py gpu=8gb")


@pytest.mark.parametrize(
    ("python", "message"),
    [
        ("no-such-python", 'there is no "no-such-python" here. Install Python 3.11 or newer'),
        ("old-python", "is Python 3.8.0; 3.11 or newer is needed. Name one: make PYTHON="),
        ("bare-python", "comes without venv. On Debian or Ubuntu: apt-get install python3-venv"),
    ],
)
def test_a_python_that_will_not_do_is_told(tmp_path: Path, python: str, message: str):
    script(tmp_path / "old-python", 'test "$1" = -V && echo Python 3.8.0; exit 1')
    script(tmp_path / "bare-python", 'case "$2" in *venv*) exit 1;; esac')
    name = python if python.startswith("no-") else str(tmp_path / python)
    done = make("install", f"PYTHON={name}", f"VENV={tmp_path / 'venv'}")
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "venv").exists()


def script(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)


def test_an_interrupted_installation_is_done_again(tmp_path: Path):
    """pip fails once, then works: the second `make` installs, the third has nothing to do; tests add what they need."""
    copy, calls = tmp_path / "project", tmp_path / "calls"
    copy.mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, copy)
    script(
        tmp_path / "venv-python",
        f'case "$*" in *"pip install"*"-e "*) echo "$*" | sed "s/.* -e //" >> {calls}; '
        f'test "$(wc -l < {calls})" -gt 1;; *train.py*) echo trained;; esac',
    )
    script(
        tmp_path / "python",
        f'case "$*" in "-m venv"*) mkdir -p .venv/bin && cp {tmp_path}/venv-python .venv/bin/python;; '
        f'*) exec {sys.executable} "$@";; esac',
    )

    def make(target: str) -> int:
        command = ["make", target, f"PYTHON={tmp_path / 'python'}"]
        return subprocess.run(command, cwd=copy, capture_output=True, timeout=30).returncode

    assert [make("train") for _ in range(3)] == [2, 0, 0]
    assert calls.read_text().split() == [RUNS, RUNS]
    assert [make("install") for _ in range(2)] == [0, 0]
    assert calls.read_text().split() == [RUNS, RUNS, ".[dev,search]"]
    os.utime(copy / "constraints.txt")
    for stamp in (".installed", ".installed-dev"):
        os.utime(copy / ".venv" / stamp, (0, 0))
    assert make("test") == 0
    assert calls.read_text().split()[3:] == [RUNS, ".[dev,search]"]
    assert make("test-guests") == 0
    assert calls.read_text().split()[5:] == [".[dev,search,guests,slurm,ray]"]
