"""Prepares what a bench compares: A, another commit, and B, the working tree as it is."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from wellfed import project
from wellfed.command_line import command
from wellfed.errors import ConfigError
from wellfed.masking import masked_override
from wellfed.process import StopRequest
from wellfed.record.provenance import git_output, git_state

_SCRIPT = Path("src", "train.py")
_CHECKOUT_S = 600
"""Most seconds that git may take to check out a commit."""


@dataclass(frozen=True)
class BenchSide:
    """Code that is trained in every round."""

    letter: str
    title: str
    project: Path
    """Folder whose ``src/train.py`` runs."""
    overrides: tuple[str, ...]
    commit: str | None
    is_changed: bool = False
    """Whether there are uncommitted changes beside the commit."""

    @property
    def script(self) -> Path:
        """Entry script that trains."""
        return self.project / _SCRIPT


@contextmanager
def two_sides(typed: Sequence[str], against: str, stop: StopRequest) -> Iterator[tuple[BenchSide, BenchSide]]:
    """Yields A and B. The worktree of another commit exists within the block alone.

    Raises:
        ConfigError: there is no such commit, or no project in it.
    """
    root, overrides = project.root(), tuple(typed)
    state = git_state(root)
    here = (state["commit"], state["dirty"]) if state else (None, False)
    with _checkout(root, against, stop) as (folder, commit):
        title = commit[:10] if commit.startswith(against) else f"{against} ({commit[:10]})"
        yield (
            BenchSide("A", title, folder, overrides, commit),
            BenchSide("B", "the working tree", root, overrides, *here),
        )


@contextmanager
def _checkout(root: Path, revision: str, stop: StopRequest) -> Iterator[tuple[Path, str]]:
    """Yields the project's folder in a temporary worktree of a revision, and the commit."""
    where = f"--against {masked_override(revision)}"
    try:
        top = Path(git_output(root, "rev-parse", "--show-toplevel").strip())
    except (OSError, subprocess.SubprocessError) as error:
        problem = f"names a commit, and git has none of {root}: {_said(error)}."
        raise ConfigError.of(where, problem, "Commit the project: git init, git add, git commit.") from error
    try:
        commit = git_output(root, "rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}").strip()
    except subprocess.SubprocessError as error:
        way_out = "git log lists commits. A shallow clone has the newest alone: git fetch --unshallow."
        if "=" in revision:
            way_out = f"Compare settings by a sweep: {command('train')} -m sweep=quick loader=baseline,balanced"
        raise ConfigError.of(where, "is no commit, branch or tag of this repository.", way_out) from error
    scratch = Path(tempfile.mkdtemp(prefix="wellfed-bench-"))
    tree = scratch / "tree"
    try:
        try:
            hooks = ("-c", "core.hooksPath=/dev/null")  # a user's hook may install or start something
            added = (*hooks, "worktree", "add", "--detach", "--quiet", str(tree), commit)
            git_output(root, *added, timeout_s=_CHECKOUT_S)
        except subprocess.SubprocessError as error:
            raise ConfigError.of(
                where, f"can't be checked out: {_said(error)}.", "Make room, or check it out."
            ) from error
        folder = tree / root.resolve().relative_to(top.resolve())
        if not (folder / _SCRIPT).is_file():
            raise ConfigError.of(where, f"has no {_SCRIPT}.", "Name a commit that has the project.")
        yield folder, commit
    finally:
        was_finishing, stop.is_finishing = stop.is_finishing, True  # a second Ctrl-C must not leave the worktree
        # `git worktree prune` would also remove worktrees of the user on a disk that is not mounted now.
        with suppress(OSError):
            shutil.rmtree(tree / (tree / ".git").read_text(encoding="utf-8").removeprefix("gitdir:").strip())
        shutil.rmtree(scratch, ignore_errors=True)
        stop.is_finishing = was_finishing


def _said(error: Exception) -> str:
    """Returns what git printed about an error, in one line."""
    printed = getattr(error, "stderr", None)
    return " ".join((printed if isinstance(printed, str) and printed.strip() else str(error)).split()).rstrip(".")
