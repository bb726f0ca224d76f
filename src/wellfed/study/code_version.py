"""Names the version of the code that trials run, by which rows of a ledger can be compared."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterable
from pathlib import Path

from wellfed import project
from wellfed.record import EngineState, GitState, engine_state, engine_version, git_output, git_state
from wellfed.study.points.grid import NO_AXES, group_of

_SOURCES = ", sources "
"""Precedes the digest of files that git does not track."""


def code_version(git: GitState | None, engine: EngineState | None) -> str:
    """Returns the project's commit, with a digest of what was changed since.

    The engine's version follows if it is not part of the project's checkout. Without a checkout it stands alone.
    """
    if git is None:
        return engine_version(engine)
    own = "" if engine is None or engine["within_project"] else f", {engine_version(engine)}"
    # Records of earlier versions have no digest.
    digest = git.get("digest") or (hashlib.sha256(git["diff"].encode()).hexdigest() if git["diff"].strip() else "")
    return f"{git['commit'][:10]}{'+' if digest else ''}{digest[:6]}{own}"


def option_files(config_dirs: Iterable[Path], options: Iterable[tuple[str, str]]) -> list[Path]:
    """Returns the files that options may be in, without options of the study itself, such as its sweep.

    Args:
        config_dirs: folders of configurations.
        options: pairs of a group and its option.
    """
    pairs = [(group, option) for group, option in options if group_of(group) not in NO_AXES]
    return [folder / group / f"{option}.yaml" for folder in config_dirs for group, option in pairs]


def study_code(chosen: Iterable[Path], written: Iterable[Path] = ()) -> str:
    """Returns the version of project and engine that trials run, as a ledger has it.

    Files that git does not track count where a trial may read them: Python files, and the options that are chosen.

    Args:
        chosen: files of the options that trials name; some may not exist.
        written: files that the study writes; they do not count unless they are chosen.
    """
    folder, engine = project.root(), engine_state()
    named = {path.resolve() for path in chosen}
    if (state := git_state(folder)) is None:
        return _with_sources(engine_version(engine), read_by_trials(named))
    try:
        root = Path(git_output(folder, "rev-parse", "--show-toplevel").strip())
        own = [path for path in {path.resolve() for path in written} - named if path.is_relative_to(root)]
        but = [f":(top,exclude,literal){path.relative_to(root)}" for path in own]
        diff = git_output(folder, "diff", "HEAD", "--no-color", "--no-ext-diff", "--", ":(top)", *but)
        listed = ("ls-files", "--others", "--exclude-standard", "--full-name", "-z", "--", ":(top)*.py", ":(top)*.yaml")
        new = [root / each for each in sorted(git_output(folder, *listed).split("\0")) if each]
        texts = _texts(path for path in new if path.suffix == ".py" or path in named)
    except (OSError, subprocess.SubprocessError):
        return code_version(state, engine)
    return _with_sources(code_version({**state, "diff": diff, "digest": ""}, engine), texts)


def read_by_trials(chosen: Iterable[Path]) -> list[str]:
    """Returns what trials read when they begin: a digest of the Python files, and the options that are ``chosen``."""
    return [project.source_digest(), *_texts(sorted({path.resolve() for path in chosen}))]


def is_same_code(earlier: str, now: str) -> bool:
    """Returns whether no change is known since the ``earlier`` version, which may lack the files outside git."""
    return earlier in (now, now.partition(_SOURCES)[0])


def _with_sources(version: str, texts: list[str]) -> str:
    return f"{version}{_SOURCES}{hashlib.sha256(''.join(texts).encode()).hexdigest()[:6]}" if texts else version


def _texts(paths: Iterable[Path]) -> list[str]:
    """Returns names and contents of the files that exist: an editor's lock is a link to nothing."""
    there = (path for path in paths if path.is_file())
    return [f"{path.name}\n{path.read_text(encoding='utf-8', errors='replace')}" for path in there]
