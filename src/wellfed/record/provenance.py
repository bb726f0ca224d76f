"""Finds what a run was made by: the commit of the project, its uncommitted change, and the engine."""

from __future__ import annotations

import hashlib
import os
import subprocess
from functools import cache
from pathlib import Path

from wellfed import __version__, project
from wellfed.record.entries import EngineState, GitState

_MOST_CHANGED = 100
"""Maximum number of changed files that are named."""


def git_output(folder: Path, *arguments: str, timeout_s: float = 20) -> str:
    """Returns the output of a git command in a folder. It takes no lock that a user's command would wait for.

    Raises:
        OSError: git can't be started.
        subprocess.SubprocessError: the command fails, or takes longer than ``timeout_s``.
    """
    of_a_hook = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")  # a command would change the hook's own index
    kept = {name: value for name, value in os.environ.items() if name not in of_a_hook}
    command, environment = ["git", "-C", str(folder), *arguments], {**kept, "GIT_OPTIONAL_LOCKS": "0"}
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=True, env=environment
    ).stdout


def git_state(folder: Path) -> GitState | None:
    """Returns commit and changes of the checkout that holds ``folder``; None outside one or without git."""
    try:
        commit = git_output(folder, "rev-parse", "HEAD").strip()
        diff = git_output(folder, "diff", "HEAD", "--no-color", "--no-ext-diff")
        named = git_output(folder, "diff", "HEAD", "--name-only", "-z")
        # Of the whole checkout, as the diff.
        named += git_output(folder, "ls-files", "--others", "--exclude-standard", "--full-name", "-z", ":/")
    except (OSError, subprocess.SubprocessError):
        return None
    digest = hashlib.sha256(diff.encode()).hexdigest()[:16] if diff.strip() else ""
    changed = [name for name in named.split("\0") if name]
    return {"commit": commit, "dirty": bool(changed or digest), "changed": changed[:_MOST_CHANGED], "digest": digest}


def engine_state() -> EngineState:
    """Returns the engine that this process uses. Calls git once a project if it is in a checkout of its own."""
    return _engine_state(project.root())


@cache
def _engine_state(root: Path) -> EngineState:
    within = project.is_engine_within(root)
    git = None if within or project.is_engine_installed() else git_state(project.ENGINE)
    return {
        "version": __version__,
        "commit": None if git is None else git["commit"],
        "dirty": git is not None and git["dirty"],
        "within_project": within,
    }


def engine_version(engine: EngineState | None) -> str:
    """Returns the engine as text: ``wellfed 0.2.0``, with its commit if it has a checkout of its own."""
    if engine is None:
        return "wellfed of an unknown version"
    commit = f" at {engine['commit'][:10]}{'+' if engine['dirty'] else ''}" if engine["commit"] else ""
    return f"wellfed {engine['version']}{commit}"
