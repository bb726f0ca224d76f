"""Runs the project's commands the way a user types them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FAST = ("workload.data.scale=0.02", "workload.model.encoder_layers=1", "telemetry.ceiling_steps=3")
"""A run of seconds: 380 users."""


@dataclass(frozen=True)
class Done:
    """A finished command."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


def environment(**more: str) -> dict[str, str]:
    """One thread (the machine is shared with other tests), no login, wide tables."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB_", "HYDRA_"))}
    return {**kept, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "HOME": kept.get("HOME", "/"), **more}


def start(script: str, *arguments: str, cwd: Path, **more: str) -> subprocess.Popen[str]:
    """Start a script of ``src/``."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / "src" / script), *arguments],
        cwd=cwd,
        env=environment(**more),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run(script: str, *arguments: str, cwd: Path, **more: str) -> Done:
    """Run a script of ``src/`` to its end."""
    process = start(script, *arguments, cwd=cwd, **more)
    out, err = process.communicate(timeout=300)
    return Done(process.returncode, out, err)


def train(*arguments: str, cwd: Path, **more: str) -> Done:
    """``python src/train.py`` on a small embedded set."""
    return run("train.py", *FAST, *arguments, cwd=cwd, **more)


def run_folders(cwd: Path, workload: str = "recsys") -> list[Path]:
    """The run folders below a working directory, oldest first."""
    return sorted((cwd / "logs" / workload / "runs").glob("*"))


def only_folder(cwd: Path, workload: str = "recsys") -> Path:
    """The one run folder."""
    (folder,) = run_folders(cwd, workload)
    return folder


def record_of(folder: Path) -> Mapping[str, Any]:
    """``run.json`` as strict JSON."""
    return json.loads((folder / "run.json").read_text(), parse_constant=lambda name: 1 / 0)
