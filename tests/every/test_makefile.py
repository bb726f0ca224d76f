"""Targets of the Makefile and what they type."""

import os
import re
import subprocess
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
