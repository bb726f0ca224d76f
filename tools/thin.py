"""Makes a project with a copy of the engine thin: ``python tools/thin.py PROJECT``, in a clone of the template.

Earlier templates copied the engine, its documents and tests into each project. Those that are unchanged are removed;
changed ones are moved to ``before_thin/``. The project's own files stay. docs/engine.md has the rules.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import scaffold
from scaffold import TEMPLATE, Files, ScaffoldError, git

ENGINE = ("src/wellfed/", "src/hydra_plugins/")
"""Must be gone, or they would hide the engine that is installed."""
COPIED = ("docs/", "tests/every/", "benchmarks/")
"""Folders with files of the template and of the user."""
REPLACED = (
    ".github/workflows/ci.yml", ".pre-commit-config.yaml", "Makefile", "constraints.txt", "engine.txt",
    "pyproject.toml", "src/evaluate.py", "src/train.py", "src/tune.py", "tests/test_workloads.py",
    "tools/engine.py", "vendor/",
)  # fmt: skip
"""Files that a thin project needs as they are in a new one."""
ASIDE = "before_thin"
_MOVED = re.compile(rb"\bwellfed\.(prepared|shards)\b")
"""Modules of the engine that the project's code may import and that are in ``wellfed.data`` now."""
_SPDX = re.compile(r"[\w.+()-]+( (AND|OR|WITH) [\w.+()-]+)*")
"""Licence expression."""


@dataclass
class Change:
    """What becomes of the project."""

    removed: list[str] = field(default_factory=list)
    aside: list[str] = field(default_factory=list)
    """Changed files, moved or copied to `ASIDE`."""
    written: Files = field(default_factory=dict)
    dependencies: list[str] = field(default_factory=list)
    """Those that the user had added."""


def versions(repository: Path, changes: str) -> dict[str, set[str]]:
    """Returns path -> the blob that a commit has first added ("A"), or all that were added and changed ("AM")."""
    found: dict[str, set[str]] = {}
    if not (repository / ".git").exists():  # a zip archive: the tree itself is what is known
        for path, file in scaffold.read(repository).items():
            blob = hashlib.sha1(b"blob %d\0" % len(file.content) + file.content, usedforsecurity=False)
            found[path] = {blob.hexdigest()}
        return found
    command = ["log", "--all", "--format=", "--raw", "--no-abbrev", "--no-renames", f"--diff-filter={changes}", "-z"]
    parts = iter(git(repository, *command).split("\0"))
    for part in parts:
        if part.startswith(":"):
            path, blob = next(parts), part.split(" ")[3]
            found[path] = {blob} | (found.get(path, set()) if "M" in changes else set())  # newest first
    return found


def decide(template: Path, project: Path) -> Change:
    """Returns what is to be done; changes nothing.

    Raises:
        ScaffoldError: the folder is no project with a copy of the engine, or has changes that are not committed.
    """
    for needed, what in (("configs/train.yaml", "no project"), ("src/wellfed", "no copy of the engine: it is thin")):
        if not (project / needed).exists():
            raise ScaffoldError(f"{project} has no {needed}: {what}. Name a project that an earlier template made.")
    if not (project / ".git").exists():
        raise ScaffoldError(f"{project} is no git repository, so nothing could be undone. First: git init, commit all.")
    if changes := git(project, "status", "--porcelain").splitlines():
        raise ScaffoldError(
            f"{len(changes)} files have changes that are not committed ({changes[0][3:]}). Commit or stash them first."
        )
    if (project / ASIDE).exists():
        raise ScaffoldError(f"{project / ASIDE} is there already. Move it away.")
    entries = filter(None, git(project, "ls-files", "-s", "-z").split("\0"))
    blobs = {path: entry.split(" ")[1] for entry, path in (each.split("\t", 1) for each in entries)}
    of_template, at_first = versions(template, "AM"), versions(project, "A")

    def is_unchanged(path: str) -> bool:
        return blobs[path] in of_template.get(path, set()) | at_first.get(path, set())

    change = Change()
    source = scaffold.read(template)
    old = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    change.dependencies = _added_dependencies(old, source)
    answers = answers_of(project, old)
    for path in blobs:
        is_engine = path.startswith(ENGINE)
        if is_engine or (path.startswith(COPIED) and path in of_template):
            is_known = is_unchanged(path) and (not is_engine or path in of_template or path == "src/wellfed/LICENSE")
            (change.removed if is_known else change.aside).append(path)
    own = {path: scaffold.File((project / path).read_bytes()) for path in blobs if _is_own_code(path)}
    for path, file in scaffold.project_files(source, answers, change.dependencies, own).items():
        if path.startswith((f"src/{answers['package_name']}/", f"tests/{answers['package_name']}/")):
            continue
        if path not in blobs:
            is_wanted = path.startswith(REPLACED) or not path.startswith(("configs/workload/", "configs/experiment/"))
        elif path.startswith(REPLACED):
            is_wanted = blobs[path] != _blob(file.content)
            if is_wanted and not is_unchanged(path):
                change.aside.append(path)
        else:
            is_wanted = path == "README.md" and is_unchanged(path)
        if is_wanted:
            change.written[path] = file
    for path, file in own.items():
        if _MOVED.search(file.content):
            change.written[path] = scaffold.File(_MOVED.sub(rb"wellfed.data.\1", file.content))
    return change


def _blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _is_own_code(path: str) -> bool:
    return path.startswith("src/") and path.endswith(".py") and not path.startswith(ENGINE)


def _name(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    return re.sub(r"[-_.]+", "-", found[0] if found else requirement).lower()


def _added_dependencies(old: dict[str, Any], source: Files) -> list[str]:
    """Returns dependencies that no version of the engine brings."""
    engine = tomllib.loads(source["pyproject.toml"].content.decode())["project"]
    known = [*engine["dependencies"], *(each for extra in engine["optional-dependencies"].values() for each in extra)]
    names = {_name(each) for each in known} | {"wellfed"}
    return [each for each in old.get("dependencies", []) if _name(each) not in names]


def answers_of(project: Path, old: dict[str, Any]) -> dict[str, Any]:
    """Returns the answers that the project was made with, as its files have them.

    Raises:
        ScaffoldError: its default workload names no package, or its licence has no SPDX expression.
    """
    train = (project / "configs/train.yaml").read_text(encoding="utf-8")
    choices = dict(re.findall(r"(?m)^\s*- (gpu|workload): (\w+)", train))
    option = project / "configs/workload" / f"{choices.get('workload')}.yaml"
    target = re.search(r"_target_: (\w+)\.", option.read_text(encoding="utf-8")) if option.is_file() else None
    if target is None:
        raise ScaffoldError(f"{project / 'configs/train.yaml'} names no workload with a _target_. Name your own there.")
    readme = project / "README.md"
    title = re.match(r"# (.+)", readme.read_text(encoding="utf-8")) if readme.is_file() else None
    name = title[1] if title else old["name"]
    license = old.get("license", scaffold.SPDX["Proprietary"])  # no licence: all rights reserved
    spdx = license.get("text", "") if isinstance(license, dict) else license
    if not _SPDX.fullmatch(spdx):
        way_out = 'Write it there, such as license = "MIT", and commit it.'
        raise ScaffoldError(
            f"{project / 'pyproject.toml'} has license={license}: it must be an SPDX expression. {way_out}"
        )
    licenses = {spdx: license for license, spdx in scaffold.SPDX.items()}
    return {
        "project_name": name,
        "project_slug": old["name"],
        "package_name": target[1],
        "description": old.get("description", ""),
        "author": next((each.get("name") or each["email"] for each in old.get("authors", [])), f"The {name} authors"),
        "license": licenses.get(spdx, spdx),
        "gpu": choices.get("gpu", "auto"),
        "workload": scaffold.BLANK,
        "wandb_mode": "auto",
        "wandb_entity": "",
    }


def carry_out(change: Change, project: Path) -> None:
    """Removes, moves and writes.

    Raises:
        ScaffoldError: a file can't be written.
    """
    try:
        for path in change.aside:
            target = project / ASIDE / path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(project / path, target)
        scaffold.remove([*change.removed, *change.aside], project)
    except OSError as error:
        raise ScaffoldError(f"{error.filename}: {error.strerror}. git reset --hard undoes what was done.") from error
    scaffold.write(change.written, project)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="tools/thin.py", description="Replace a project's copy of the engine by a wheel."
    )
    parser.add_argument("project", type=Path)
    project = parser.parse_args(arguments).project
    try:
        change = decide(TEMPLATE, project)
        carry_out(change, project)
    except ScaffoldError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{len(change.removed)} files of the engine's copy removed, {len(change.written)} of a thin project written.")
    if change.aside:
        print(f"Changed by you, now in {ASIDE}/: take from there what you need, then remove it.")
        print("\n".join(f"  {path}" for path in sorted(change.aside)))
    if change.dependencies:
        print(f"Dependencies of yours that pyproject.toml still has: {', '.join(change.dependencies)}")
    print(
        "Try it with make format (imports have a new order) and make test. Look at it with git status, keep it with "
        "git add -A and git commit."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
