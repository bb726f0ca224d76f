"""Turns this template into a project: a new folder for cookiecutter's hook, or in place for `make new`.

    python tools/scaffold.py fill PROJECT < answers.json
    python tools/scaffold.py new "My Nets" [key=value ...]

A project's files are copies of the template's (`SAME`), those of `THIN` with the answers put in, the workload to start
from under the package's name, and the engine as a wheel. All of it is made in memory before the first file is written:
a fault leaves nothing behind. Needs Python and, where the template is a repository, git.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
import time
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

TEMPLATE = Path(__file__).resolve().parents[1]
THIN = "{{cookiecutter.project_slug}}/"
"""Folder of the files that hold answers; cookiecutter copies it, `rendered` puts the answers in."""
BLANK = "blank"
"""The workload to start from when it is no example: what `wellfed add workload` copies too."""

SAME = (
    ".github/dependabot.yml", ".gitignore", ".pre-commit-config.yaml", "configs/", "constraints.txt", "src/evaluate.py",
    "src/train.py", "src/tune.py",
)  # fmt: skip
"""Beginnings of paths that are the same in every project, but for what belongs to an example."""
SPDX = {"Proprietary": "LicenseRef-Proprietary"}
"""License -> how pyproject.toml calls it, where that differs."""
LINE_LENGTH = 120


class ScaffoldError(Exception):
    """No project can be made; the message says why and the way out."""


@dataclass(frozen=True)
class File:
    """A file of the template or of the project."""

    content: bytes
    executable: bool = False


Files = dict[str, File]
"""Path with forward slashes, from the root -> file."""
Answers = Mapping[str, Any]
"""Answers to cookiecutter.json; more keys do no harm."""


# ---- the template's files ----


def git(folder: Path, *arguments: str) -> str:
    """Returns what git prints in ``folder``. Variables such as GIT_DIR and the owner of the folder have no effect.

    Raises:
        ScaffoldError: git is missing or fails.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    command = ["git", "-c", "safe.directory=*", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, check=False)
    except OSError as error:
        raise ScaffoldError(f"git can't be run: {error.strerror}. Install git.") from error
    if done.returncode != 0:
        raise ScaffoldError(f"git {arguments[0]} failed in {folder}: {os.fsdecode(done.stderr).strip()}")
    return os.fsdecode(done.stdout)


def paths(template: Path) -> list[str]:
    """Returns the present files that git tracks. Without a repository (a zip archive): all that .gitignore leaves."""
    if (template / ".git").exists():
        names = git(template, "ls-files", "-z").split("\0")
        return sorted(name for name in names if name and (template / name).is_file())
    ignored = [".git"]
    if (template / ".gitignore").is_file():
        lines = (template / ".gitignore").read_text(encoding="utf-8").splitlines()
        ignored += [line.strip().strip("/") for line in lines if line.strip() and not line.startswith("#")]
    found = []
    for folder, folders, files in os.walk(template):
        for names in (folders, files):
            names[:] = [name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in ignored)]
        found += [(Path(folder) / name).relative_to(template).as_posix() for name in files]
    return sorted(found)


def read(template: Path) -> Files:
    """Returns all files of the template.

    Raises:
        ScaffoldError: one can't be read, or there is none.
    """
    files = {}
    for path in paths(template):
        try:
            files[path] = File((template / path).read_bytes(), bool((template / path).stat().st_mode & 0o100))
        except OSError as error:
            raise ScaffoldError(f"{template / path} can't be read: {error.strerror}. Check its rights.") from error
    if not files:
        raise ScaffoldError(f"{template} has no files that git tracks. Commit them, or remove its .git.")
    return files


def examples(source: Files) -> list[str]:
    """Returns the names of the example workloads."""
    return sorted({path.split("/")[2] for path in source if re.match(r"src/workloads/[^/]+/", path)})


def of_example(path: str, name: str) -> bool:
    """Returns whether the file belongs to that example alone."""
    name = re.escape(name)
    return bool(
        re.match(rf"(src|tests)/workloads/{name}/", path)
        or re.match(rf"configs/(workload|experiment)/{name}(_\w+)?\.yaml", path)
        or re.match(rf"benchmarks/(records/[\d-]+_(before_after_)?)?{name}_", path)
    )


# ---- the project's files ----


def project_files(source: Files, answers: Answers, more: Iterable[str] = (), own: Files | None = None) -> Files:
    """Returns all files of the project.

    Args:
        more: dependencies beside the engine.
        own: code of an existing project, which decides about the engine's extras. Its licence may be any. None = a new
            project: the workload to start from decides.

    Raises:
        ScaffoldError: an answer is none of the choices, a name is that of a pinned package, or the template lacks a
            file.
    """
    known = examples(source)
    for key, choices in {"license": licenses(source), "workload": [BLANK, *known]}.items():
        if answers[key] not in choices and not (own and key == "license"):
            raise ScaffoldError(f"{key}={answers[key]}: it must be one of {', '.join(choices)}.")
    if taken := _taken(source, answers, {"project_slug": "-"} if own else {"project_slug": "-", "package_name": "_"}):
        raise ScaffoldError("\n".join(taken))
    files = {
        path: file
        for path, file in source.items()
        if path.startswith(SAME) and not any(of_example(path, name) for name in known)
    }
    start = starting_workload(source, answers)
    files |= start
    if licence := source.get(f"tools/licenses/{answers['license']}.txt"):
        text = licence.content.decode().replace("<author>", str(answers["author"]))
        files["LICENSE"] = File(text.encode())
    try:
        name, wheel = program("tools/wheel.py")["build"]({path: file.content for path, file in source.items()})
    except KeyError as error:
        raise ScaffoldError(f"The template has no {error}: no engine can be made of it. Clone it anew.") from error
    version = name.split("-")[1]
    pins = program(f"{THIN}tools/engine.py")
    files[f"vendor/{name}"] = File(wheel)
    files["engine.txt"] = File(pins["pin_of_wheel"](wheel, version).encode())
    return files | rendered(source, answers, [f"wellfed{extras_of(own or start)}=={version}", *more])


def _taken(source: Files, answers: Answers, joints: Mapping[str, str]) -> list[str]:
    """Returns a line for each name that constraints.txt pins for another package.

    Args:
        joints: key of a name -> what joins its words.
    """

    def plain(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    pinned = {plain(name) for name in re.findall(r"(?m)^([\w.-]+)==", source["constraints.txt"].content.decode())}
    return [
        f"{key}={answers[key]!r}: constraints.txt pins a package of this name, and there can't be two. "
        f"Take {key}=my{joint}{plain(answers[key]).replace('-', joint)}."
        for key, joint in joints.items()
        if plain(answers[key]) in pinned
    ]


def program(path: str) -> dict[str, Any]:
    """Returns the functions and tables of a file of the template that needs Python alone."""
    return runpy.run_path(str(TEMPLATE / path))


def licenses(source: Files) -> list[str]:
    """Returns the names of the licences that there is a text of."""
    return sorted(path.split("/")[2].removesuffix(".txt") for path in source if path.startswith("tools/licenses/"))


def extras_of(files: Files) -> str:
    """Returns the extras of the engine that this code needs, in brackets; empty without any."""
    code = b"\n".join(file.content for path, file in files.items() if path.startswith("src/")).decode(errors="replace")
    imported = set(re.findall(r"(?m)^ *(?:from|import) (\w+)", code))
    packages = program("src/wellfed/extras.py")["PACKAGES"]
    extras = sorted({extra for package, (extra, _) in packages.items() if package in imported})
    return f"[{','.join(extras)}]" if extras else ""


def rendered(source: Files, answers: Answers, dependencies: Iterable[str]) -> Files:
    """Returns the files of `THIN` with the answers in the place of ``{{ cookiecutter.<key> }}``.

    ``{{ made.<key> }}`` is what follows from the answers. In toml and yaml an answer stands within double quotes.
    """
    made = {
        "license": SPDX.get(str(answers["license"]), answers["license"]),
        "entity": json.dumps(answers["wandb_entity"]) if answers["wandb_entity"] else "null",
        "dependencies": "\n".join(f"  {json.dumps(each)}," for each in dependencies),
    }

    def render(path: str, text: str) -> str:
        def value(found: re.Match[str]) -> str:
            if found[1] == "made":
                return str(made[found[2]])
            answer = str(answers[found[2]])
            # Both have JSON's escapes; control characters are refused before.
            return json.dumps(answer, ensure_ascii=False)[1:-1] if path.endswith((".toml", ".yaml")) else answer

        return re.sub(r"\{\{ (cookiecutter|made)\.(\w+) \}\}", value, text)

    return {
        path.removeprefix(THIN): File(render(path, file.content.decode("utf-8")).encode("utf-8"), file.executable)
        for path, file in source.items()
        if path.startswith(THIN)
    }


def starting_workload(source: Files, answers: Answers) -> Files:
    """Returns the user's own package with its yaml and tests: the chosen workload under the package's name."""
    start, package = str(answers["workload"]), str(answers["package_name"])
    moves = {
        f"configs/workload/{start}.yaml": f"configs/workload/{package}.yaml",
        f"configs/experiment/{start}_": f"configs/experiment/{package}_",
        f"src/workloads/{start}/": f"src/{package}/",
        f"tests/workloads/{start}/": f"tests/{package}/",
    }
    if start == BLANK:
        moves = {
            "src/wellfed/cli/blank/workload.yaml": f"configs/workload/{package}.yaml",
            "src/wellfed/cli/blank/": f"src/{package}/",
            "tests/blank/": f"tests/{package}/",
        }
    files = {}
    for path, file in source.items():
        for old, new in moves.items():
            if path.startswith(old):
                target = new + path.removeprefix(old)
                files[target] = file
                with suppress(UnicodeDecodeError):  # an image, a table: nothing to rename
                    text = renamed(file.content.decode("utf-8"), start, package)
                    files[target] = File(text.encode("utf-8"), file.executable)
                break
    return files


def renamed(text: str, start: str, package: str) -> str:
    """Returns a file of a workload as one of the package: dotted paths, folders and the workload's name.

    What the template has measured stays with the template: the card's paragraph on it, remarks that name a benchmark.
    """
    text = text.partition("\n**Learning.**")[0].rstrip("\n") + "\n" if "\n**Learning.**" in text else text
    text = re.sub(r" \(`benchmarks/[\w./]+`\)", "", text)
    text = re.sub(rf"\b(workloads|wellfed[./]cli)([./]){re.escape(start)}\b", package, text)
    text = re.sub(_named(start), package, text)
    return re.sub(rf"(?m)^ *from {package}[\w.]* import .*$", _wrapped, text)


PLACES = (
    "workload=", "workload: ", "--workload ", "add workload ", "\nname: ", r"\Aname: ", r"\A# ", "W=", "logs/", "`",
)  # fmt: skip
"""What stands before the name of a workload in commands, yaml, paths and headings."""


def _named(name: str) -> str:
    """Pattern of an example's name where it is one: elsewhere it may be a word."""
    before = "|".join(f"(?<={place})" for place in PLACES)
    return rf"(?:{before}){re.escape(name)}(?![\w-])|(?:(?<=experiment=)|(?<=  - )|(?<=`)){re.escape(name)}(?=_)"


def _wrapped(line: re.Match[str]) -> str:
    """Returns an import as the formatter has it: the package's name makes some too long."""
    before, names = line[0].split(" import ")
    if len(line[0]) <= LINE_LENGTH or names.endswith("("):
        return line[0]
    indent = before[: len(before) - len(before.lstrip())]
    return (
        f"{before} import (\n" + "".join(f"{indent}    {name.strip()},\n" for name in names.split(",")) + f"{indent})"
    )


# ---- writing ----


def write(files: Files, folder: Path) -> None:
    """Writes what is not there already in the same form.

    Raises:
        ScaffoldError: a file can't be written.
    """
    for path, file in files.items():
        target = folder / path
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            if not (target.is_file() and target.read_bytes() == file.content):
                target.write_bytes(file.content)
            mode = target.stat().st_mode
            target.chmod(mode | 0o111 if file.executable else mode & ~0o111)
        except OSError as error:
            raise ScaffoldError(f"{target} can't be written: {error.strerror}. Check the disk and rights.") from error


def remove(paths: Iterable[str], folder: Path) -> None:
    """Removes files, and the folders that then hold nothing but bytecode."""
    paths = list(paths)
    for path in paths:
        (folder / path).unlink()
    for top in {path.partition("/")[0] for path in paths if "/" in path}:
        _remove_if_empty(folder / top)


def _remove_if_empty(folder: Path) -> None:
    for each in list(folder.iterdir()):
        if each.name == "__pycache__":
            shutil.rmtree(each)
        elif each.is_dir() and not each.is_symlink():
            _remove_if_empty(each)
    if not any(folder.iterdir()):
        folder.rmdir()


def fill(template: Path, project: Path, answers: Answers) -> None:
    """Writes a new project, over what cookiecutter has copied."""
    write(project_files(read(template), answers), project)
    for folder in (template / THIN).rglob("__pycache__"):  # of a clone whose tests have run: cookiecutter copies it
        shutil.rmtree(project / folder.relative_to(template / THIN), ignore_errors=True)


# ---- in place ----


def slug_of(name: str) -> str:
    """Folder name for a name: as cookiecutter's slugify makes it, for letters that have a plain one beneath.

    Raises:
        ScaffoldError: there are others, which only a table of all scripts could spell.
    """
    plain = "".join(letter for letter in unicodedata.normalize("NFKD", name) if not unicodedata.combining(letter))
    strange = sorted({letter for letter in plain if letter.isalnum() and not letter.isascii()})
    if strange:
        raise ScaffoldError(
            f"{name!r} has letters that a folder name can't have: {' '.join(strange)}. "
            "Add a folder name: make new NAME=... ARGS=project_slug=my-nets"
        )
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"(?<=\d),(?=\d)", "", plain.lower())).strip("-")


def answers_for(template: Path, name: str, given: Iterable[str]) -> dict[str, Any]:
    """Returns all answers: ``key=value`` as given, cookiecutter.json's defaults for the rest.

    Raises:
        ScaffoldError: a key or a choice that is none, or names that can't work.
    """
    asked: dict[str, Any] = json.loads((template / "cookiecutter.json").read_text(encoding="utf-8"))
    asked = {key: default for key, default in asked.items() if not key.startswith("_")}
    pairs = dict(item.partition("=")[::2] for item in given)
    if unknown := sorted(pairs.keys() - asked.keys()):
        raise ScaffoldError(f"{unknown[0]} is no question; there are {', '.join(asked)}. Write key=value.")
    answers: dict[str, Any] = {"project_name": name}
    slug = pairs["project_slug"] if "project_slug" in pairs else slug_of(name)[:128].strip("-") or "unnamed"
    package = re.sub(r"[-.]", "_", slug.lower())
    follow = {
        "project_slug": slug,
        "package_name": (f"my_{package}" if package[:1].isdigit() else package)[:30].strip("_"),
        "author": f"The {name} authors",
    }
    for key, default in asked.items():
        value = pairs.get(key, answers.get(key, follow.get(key, default[0] if isinstance(default, list) else default)))
        if isinstance(default, list) and value not in default:
            raise ScaffoldError(f"{key}={value}: it must be one of {', '.join(default)}.")
        answers[key] = value
    faults: list[str] = runpy.run_path(str(template / "hooks" / "pre_gen_project.py"))["faults"](answers)
    if faults:
        raise ScaffoldError("\n".join(f"refused: {fault}" for fault in faults))
    return answers


def new(template: Path, name: str, given: Iterable[str]) -> Answers:
    """Make the template's own folder the project; the answers.

    Raises:
        ScaffoldError: the answers, or a tree with changes that git could not bring back.
    """
    if not (template / ".git").exists():
        raise ScaffoldError(
            f"{template} is no git repository, so nothing could be undone. First: git init, commit all."
        )
    with alone(template):
        if changes := git(template, "status", "--porcelain").splitlines():
            raise ScaffoldError(
                f"{len(changes)} files have changes that are not committed ({changes[0][3:]}). "
                "Commit or stash them first."
            )
        answers = answers_for(template, name, given)
        source = read(template)
        files = project_files(source, answers)
        write(files, template)
        remove(source.keys() - files.keys(), template)
    return answers


@contextmanager
def alone(template: Path) -> Iterator[None]:
    """Keeps a second `make new` out of the repository within the block, where the system has locks.

    Raises:
        ScaffoldError: another process is at it, or the repository can't be written.
    """
    path = Path(git(template, "rev-parse", "--absolute-git-dir").rstrip("\n")) / "make-new.lock"
    try:
        lock = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise ScaffoldError(f"{path} can't be written: {error.strerror}. Check the disk and rights.") from error
    with lock:
        try:
            if fcntl is not None:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            for _ in range(100):  # it may not have written its name yet
                lock.seek(0)
                if who := lock.read():
                    break
                time.sleep(0.02)
            who = who or "another process"
            raise ScaffoldError(f"{template} is being made a project by {who}. Wait for its end.") from error
        except OSError:
            pass  # no locks here
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        lock.flush()
        try:
            yield
        finally:
            lock.truncate(0)


def main(arguments: list[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="tools/scaffold.py", description="Make a project from this template.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("fill", help="cookiecutter's hook: answers as JSON on stdin").add_argument("project", type=Path)
    here = commands.add_parser("new", help="in place: make new")
    here.add_argument("name", nargs="?", default="")
    here.add_argument("answers", nargs="*", metavar="key=value")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "fill":
            fill(TEMPLATE, chosen.project, json.load(sys.stdin.buffer))
            return 0
        if not chosen.name:
            raise ScaffoldError('Say how the project is called: make new NAME="My Nets"')
        answers = new(TEMPLATE, chosen.name, chosen.answers)
    except ScaffoldError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"This is now {answers['project_name']}. Your model and data: src/{answers['package_name']}/")
    print("Try it with make train, look at it with git status, keep it with git add -A and git commit.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
