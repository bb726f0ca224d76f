"""Identifies the code that a tune's trials run, without the options that the tune itself writes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from wellfed import project
from wellfed.record import engine_state, git_state
from wellfed.study.trial_end import code_version


def tune_code(config_dirs: Sequence[Path], choices: Mapping[str, str], name: str) -> str:
    """Returns the version of project and engine as a ledger has it.

    Untracked files count where a trial may read them: Python files, and the options that the start names.

    Args:
        choices: group -> option of the start.
        name: name of the options that the tune writes.
    """
    folder, engine = project.root(), engine_state()
    state = git_state(folder)
    if state is None:
        return code_version(None, engine)
    chosen = {path.resolve() for path in _files(config_dirs, choices)}
    written = {path.resolve() for path in _files(config_dirs, {"loader": name, "memory": name})} - chosen
    try:
        root = Path(_git(folder, "rev-parse", "--show-toplevel").strip())
        own = [f":(top,exclude,literal){path.relative_to(root)}" for path in written if path.is_relative_to(root)]
        diff = _git(folder, "diff", "HEAD", "--no-color", "--no-ext-diff", "--", ":(top)", *own)
        listed = ("ls-files", "--others", "--exclude-standard", "--full-name", "-z", "--", ":(top)*.py", ":(top)*.yaml")
        new = [root / each for each in sorted(_git(folder, *listed).split("\0")) if each]
        texts = [
            f"{path.name}\n{path.read_text(encoding='utf-8', errors='replace')}"
            for path in new
            if path.suffix == ".py" or path in chosen
        ]
    except (OSError, subprocess.SubprocessError):
        return code_version(state, engine)
    return code_version({**state, "diff": "".join([diff, *texts]), "digest": ""}, engine)


def _files(config_dirs: Sequence[Path], choices: Mapping[str, str]) -> list[Path]:
    return [folder / group / f"{option}.yaml" for folder in config_dirs for group, option in choices.items()]


def _git(folder: Path, *arguments: str) -> str:
    """Returns what a command of git prints; it takes no lock that a user's command would wait for."""
    command, environment = ["git", "-C", str(folder), *arguments], {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=20, check=True, env=environment
    ).stdout
