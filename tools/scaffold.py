"""Fills the folder of a new project, for cookiecutter's hook.

    python tools/scaffold.py PROJECT < answers.json

A project's files are copies of the template's (`SAME`), those of `THIN` with the answers put in, the workload to start
from under the package's name, and the engine as a wheel. All of it is made in memory before the first file is written:
a fault leaves nothing behind. Needs Python, uv or pip for the engine's wheel, and git if the template is a repository.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
ENGINE = ("src/wellfed/", "src/hydra_plugins/", "docs/findings/", "pyproject.toml", "README.md", "LICENSE")
"""Beginnings of paths that the engine's wheel is built from."""
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


def project_files(source: Files, answers: Answers) -> Files:
    """Returns all files of the project.

    Raises:
        ScaffoldError: an answer is none of the choices, a name is that of a pinned package, or the template lacks a
            file.
    """
    known = examples(source)
    for key, choices in {"license": licenses(source), "workload": [BLANK, *known]}.items():
        if answers[key] not in choices:
            raise ScaffoldError(f"{key}={answers[key]}: it must be one of {', '.join(choices)}.")
    if taken := _taken(source, answers):
        raise ScaffoldError("\n".join(taken))
    files = {
        path: file
        for path, file in source.items()
        if path.startswith(SAME) and not any(of_example(path, name) for name in known)
    }
    start = starting_workload(source, answers)
    text = source[f"tools/licenses/{answers['license']}.txt"].content.decode().replace("<author>", answers["author"])
    name, wheel = build_wheel(source)
    version = name.split("-")[1]
    files |= {
        **start,
        "LICENSE": File(text.encode()),
        f"vendor/{name}": File(wheel),
        "engine.txt": File(program(f"{THIN}tools/engine.py")["pin_of_wheel"](wheel, version).encode()),
    }
    return files | rendered(source, answers, f"wellfed{extras_of(start)}=={version}")


def build_wheel(source: Files) -> tuple[str, bytes]:
    """Returns the name and content of the engine's wheel. The same files give the same bytes.

    Setuptools beside cookiecutter builds it without network. If there is none, or an old one, uv or pip fetch it.

    Raises:
        ScaffoldError: it can't be built.
    """
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else shutil.which("uv")
    with tempfile.TemporaryDirectory() as scratch:
        tree, out = Path(scratch) / "engine", Path(scratch) / "dist"
        write({path: file for path, file in source.items() if path.startswith(ENGINE)}, tree)
        if uv:
            command = [uv, "build", "--wheel", "--python", sys.executable, "--out-dir", str(out), str(tree)]
        else:
            command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(out), str(tree)]
        environment = {**os.environ, "SOURCE_DATE_EPOCH": "315532800"}  # 1980: zip archives have no earlier time
        why = ""
        for more in [["--no-build-isolation"], []] if importlib.util.find_spec("setuptools") else [[]]:
            done = subprocess.run([*command, *more], env=environment, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                break
            why = (done.stderr.strip().splitlines() or [""])[-1]
        wheels = [*out.glob("*.whl")]
        if not wheels:
            raise ScaffoldError(
                f"The engine's wheel can't be built: {why}\n"
                "Install uv, or setuptools>=77 beside cookiecutter on a machine without network."
            )
        return wheels[0].name, wheels[0].read_bytes()


def _taken(source: Files, answers: Answers) -> list[str]:
    """Returns a line for each name that constraints.txt pins for another package."""

    def plain(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    pinned = {plain(name) for name in re.findall(r"(?m)^([\w.-]+)==", source["constraints.txt"].content.decode())}
    return [
        f"{key}={answers[key]!r}: constraints.txt pins a package of this name, and there can't be two. "
        f"Take {key}=my{joint}{plain(answers[key]).replace('-', joint)}."
        for key, joint in {"project_slug": "-", "package_name": "_"}.items()
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


def rendered(source: Files, answers: Answers, engine: str) -> Files:
    """Returns the files of `THIN` with the answers in the place of ``{{ cookiecutter.<key> }}``.

    ``{{ made.<key> }}`` is what follows from the answers. In toml and yaml an answer stands within double quotes.
    """
    made = {
        "license": SPDX.get(str(answers["license"]), answers["license"]),
        "entity": json.dumps(answers["wandb_entity"]) if answers["wandb_entity"] else "null",
        "dependencies": f"  {json.dumps(engine)},",
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


def fill(template: Path, project: Path, answers: Answers) -> None:
    """Writes a new project, over what cookiecutter has copied."""
    write(project_files(read(template), answers), project)
    for folder in (template / THIN).rglob("__pycache__"):  # of a clone whose tests have run: cookiecutter copies it
        shutil.rmtree(project / folder.relative_to(template / THIN), ignore_errors=True)


def main(project: str) -> int:
    """Returns the exit code."""
    try:
        fill(TEMPLATE, Path(project), json.load(sys.stdin.buffer))
    except ScaffoldError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
