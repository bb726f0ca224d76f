"""Another commit is checked out for a block, and nothing of it stays."""

import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from tests.kit.bench_project import git, make_project
from wellfed.errors import ConfigError
from wellfed.study.bench import two_sides


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    return tmp_path / "scratch"


def is_gone(repository: Path, scratch: Path) -> bool:
    return len(git(repository, "worktree", "list").splitlines()) == 1 and not list(scratch.iterdir())


@pytest.mark.parametrize("within", [".", "a project"])
def test_the_commit_is_there_within_the_block_alone(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch, within: str
) -> None:
    repository = tmp_path / "repository"
    project = make_project(repository, within=within)
    hook = repository / ".git" / "hooks" / "post-checkout"
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/hooked\n")
    hook.chmod(0o755)
    first = git(repository, "rev-parse", "HEAD")
    (project / "src" / "rate.txt").write_text("80")
    monkeypatch.setenv("WELLFED_PROJECT", str(project))
    with two_sides("HEAD") as (a, b):
        assert (a.commit, a.is_changed, a.title) == (first, False, f"HEAD ({first[:10]})")
        assert (b.commit, b.is_changed, b.title, b.project) == (first, True, "the working tree", project)
        assert (a.project / "src" / "train.py").is_file()
        assert (a.project / "src" / "rate.txt").read_text() == "100"
        assert not is_gone(repository, scratch)
    assert is_gone(repository, scratch)
    assert not (tmp_path / "hooked").exists()
    with suppress(subprocess.SubprocessError), two_sides(first[:8]) as (a, _):  # it is raised as it is
        assert a.title == first[:10]
        assert not is_gone(repository, scratch)
        raise subprocess.SubprocessError
    assert is_gone(repository, scratch)


def test_what_can_not_be_compared_with_is_told(tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = make_project(tmp_path / "repository")
    monkeypatch.setenv("WELLFED_PROJECT", str(project))
    git(project, "checkout", "--quiet", "--orphan", "empty")
    git(project, "rm", "--quiet", "--cached", "-r", ".")
    git(project, "commit", "--quiet", "--allow-empty", "--message=nothing")
    for against, problem in {
        "no_such": "--against no_such: is no commit, branch or tag of this repository. git log lists commits.",
        "--upload-pack": "--against --upload-pack: is no commit,",
        "empty": "--against empty: has no src/train.py. Name a commit that has the project.",
        "loader=balanced": "Compare settings by a sweep: python src/train.py -m sweep=quick",
    }.items():
        with pytest.raises(ConfigError) as refused, two_sides(against):
            pytest.fail("it went on")
        assert problem in str(refused.value)
        assert is_gone(project, scratch)
    shutil.rmtree(project / ".git")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    with (
        pytest.raises(ConfigError, match="and git has none of .*: fatal: not a git repository"),
        two_sides("main"),
    ):
        pytest.fail("it went on")


def test_worktrees_and_index_of_the_user_stay(tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worktree may lie on a disk that is not mounted now, and a hook of git has variables about its index."""
    project = make_project(tmp_path / "repository")
    git(project, "worktree", "add", "--quiet", "--detach", str(tmp_path / "own"))
    (tmp_path / "own").rename(tmp_path / "away")
    (project / "src" / "rate.txt").write_text("80")
    git(project, "commit", "--quiet", "--all", "--message=second")
    monkeypatch.setenv("WELLFED_PROJECT", str(project))
    with monkeypatch.context() as in_hook:
        in_hook.setenv("GIT_DIR", str(project / ".git"))
        in_hook.setenv("GIT_INDEX_FILE", str(project / ".git" / "index"))
        with two_sides("HEAD~1") as (a, _):
            assert (a.project / "src" / "rate.txt").read_text() == "100"
    assert git(project, "status", "--porcelain") == ""
    assert str(tmp_path / "own") in git(project, "worktree", "list")
    assert len(git(project, "worktree", "list").splitlines()) == 2
    assert not list(scratch.iterdir())
