"""Chooses the engine of this project and checks it before it is installed.

    python tools/engine.py check
    python tools/engine.py change FROM

FROM is a wheel, the folder of a checkout, or a version of the package index. engine.txt holds the choice, and
pyproject.toml repeats the version. Needs Python alone: it runs before anything is installed.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import tomllib
import zipfile
import zlib
from pathlib import Path

NAME = "wellfed"
PIN, VENDOR = "engine.txt", "vendor"
HEAD = "# The engine of this project. Another: make engine FROM=<wheel, folder or version>\n"
VERSION = r"\d+(?:\.\d+)*(?:[-.+]?[a-z0-9]+)*"
GIT = f"git checkout -- {VENDOR} {PIN} pyproject.toml"


class EngineError(Exception):
    """The engine can't be installed; the message has the way out."""


def pin_of_wheel(wheel: bytes, version: str) -> str:
    """Returns the text of engine.txt for a wheel in vendor/."""
    digest = hashlib.sha256(wheel).hexdigest()
    return f"{HEAD}--no-index\n--find-links {VENDOR}\n{NAME}=={version} --hash=sha256:{digest}\n"


def dependency(pyproject: str) -> str:
    """Returns the engine among the dependencies, as it is written there.

    Raises:
        EngineError: it is not there once.
    """
    try:
        wanted = tomllib.loads(pyproject)["project"]["dependencies"]
    except (tomllib.TOMLDecodeError, KeyError) as error:
        raise EngineError(f"pyproject.toml has no dependencies that can be read: {error}. Correct it.") from error
    found = [each for each in wanted if re.fullmatch(rf"{NAME}(\[[^\]]*\])?(==.*)?", each)]
    if len(found) != 1:
        there = f"{NAME} {len(found)} times" if found else f"no {NAME}"
        raise EngineError(f'pyproject.toml has {there} in its dependencies. Write it there once: "{NAME}"')
    return str(found[0])


def with_version(pyproject: str, version: str | None) -> str:
    """Returns the text of pyproject.toml with that version of the engine; None = any.

    Raises:
        EngineError: the engine is not among the dependencies.
    """
    old = dependency(pyproject)
    return pyproject.replace(old, old.partition("==")[0] + (f"=={version}" if version else ""), 1)


def wheel_name(version: str) -> str:
    """Returns the file name of a version's wheel."""
    return f"{NAME}-{version}-py3-none-any.whl"


def check(root: Path) -> None:
    """Compares engine.txt with vendor/ and pyproject.toml.

    Raises:
        EngineError: they differ, or something is missing.
    """
    try:
        pin = (root / PIN).read_text(encoding="utf-8")
        asked = dependency((root / "pyproject.toml").read_text(encoding="utf-8"))
    except OSError as error:
        raise EngineError(f"{error.filename} can't be read: {error.strerror}. {GIT}") from error
    lines = [line for line in pin.splitlines() if line.strip() and not line.startswith(("#", "--no-index", "--find"))]
    line = lines[0] if len(lines) == 1 else ""
    if found := re.fullmatch(r"-e (.+)", line):
        _version_of_checkout(root / found[1].strip('"'))
        return
    found = re.fullmatch(rf"{NAME}==({VERSION})( +--hash=sha256:([0-9a-f]{{64}}))?", line)
    if found is None:
        raise EngineError(f"{PIN} does not name one {NAME}: {line or pin!r}. {GIT}, or make engine FROM=...")
    version, digest = found[1], found[3]
    if asked.partition("==")[2] != version:
        way_out = f"make engine FROM={f'{VENDOR}/{wheel_name(version)}' if digest else version} makes both the same."
        raise EngineError(f"{PIN} has {NAME}=={version}, and pyproject.toml has {asked}. {way_out}")
    if digest is None:
        return
    wheel = root / VENDOR / wheel_name(version)
    if not wheel.is_file():
        others = [path.name for path in sorted((root / VENDOR).glob("*.whl"))]
        other = f"{VENDOR}/{others[0]}" if others else "<wheel>"
        raise EngineError(f"{VENDOR}/{wheel.name} is missing; {PIN} names it. {GIT}, or make engine FROM={other}")
    real = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if real != digest:
        raise EngineError(
            f"{VENDOR}/{wheel.name} is not the file that {PIN} names: its sha256 is {real}, and {digest} is expected. "
            f"It is damaged or was replaced. {GIT}, or, if the file is right: make engine FROM={VENDOR}/{wheel.name}"
        )


def change(root: Path, source: str) -> str:
    """Writes the choice into engine.txt, pyproject.toml and vendor/; returns it in words.

    Raises:
        EngineError: the source will not do; nothing is changed.
    """
    path = Path(source).expanduser()
    wheel: bytes | None = None
    version: str | None
    if path.is_dir():
        said = f"the checkout {source}, version {_version_of_checkout(path)}"
        folder = os.path.relpath(path, root) if not Path(source).expanduser().is_absolute() else str(path)
        name = Path(folder).as_posix()
        version, pin = None, f"{HEAD}-e {name}\n" if " " not in name else f'{HEAD}-e "{name}"\n'
    elif path.is_file() or source.endswith(".whl") or "/" in source:
        wheel, version = _read_wheel(path)
        said, pin = f"{VENDOR}/{wheel_name(version)}", pin_of_wheel(wheel, version)
    elif re.fullmatch(VERSION, source):
        said, version, pin = f"version {source} of the package index", source, f"{HEAD}{NAME}=={source}\n"
    else:
        raise EngineError(
            f"FROM={source}: is no file, no folder and no version. Write make engine FROM=dist/{wheel_name('0.2.0')}, "
            f"FROM=../{NAME} or FROM=0.2.0"
        )
    project = root / "pyproject.toml"
    text = with_version(project.read_text(encoding="utf-8"), version)
    if wheel is not None and version is not None:
        (root / VENDOR).mkdir(exist_ok=True)
        _write(root / VENDOR / wheel_name(version), wheel)
    for old in (root / VENDOR).glob(f"{NAME}-*.whl"):
        if version is None or old.name != wheel_name(version) or wheel is None:
            old.unlink()
    _write(project, text.encode("utf-8"))
    _write(root / PIN, pin.encode("utf-8"))
    return said


def _read_wheel(path: Path) -> tuple[bytes, str]:
    """Returns content and version.

    Raises:
        EngineError: the file is no wheel of the engine, or is damaged.
    """
    problem = ""
    try:
        content = path.read_bytes()
        with zipfile.ZipFile(path) as archive:
            if broken := archive.testzip():
                problem = f"is damaged at {broken}"
            places = [name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
            if len(places) != 1:
                raise ValueError("it has no METADATA")
            text = archive.read(places[0]).decode("utf-8")
    except FileNotFoundError as error:
        raise EngineError(f"FROM={path}: there is no such file. Name a wheel, a folder or a version.") from error
    except (OSError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise EngineError(f"FROM={path}: is no wheel, or a damaged one ({error}). Copy or build it again.") from error
    fields = dict(line.split(": ", 1) for line in text.partition("\n\n")[0].splitlines() if ": " in line)
    if fields.get("Name") != NAME:
        problem = problem or f"is a wheel of {fields.get('Name', 'nothing')}, not of {NAME}"
    version = fields.get("Version", "")
    if not problem and not re.fullmatch(VERSION, version):
        problem = f"has no version that could be pinned: {version!r}"
    if problem:
        raise EngineError(f"FROM={path}: {problem}. Name a wheel of {NAME}: {wheel_name('<version>')}")
    return content, version


def _version_of_checkout(folder: Path) -> str:
    """Returns the version of the engine in a folder.

    Raises:
        EngineError: the folder has none.
    """
    try:
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        if project["name"] == NAME:
            return str(project["version"])
        problem = f"its pyproject.toml is of {project['name']}"
    except (OSError, ValueError, KeyError) as error:
        problem = f"{error.strerror}: pyproject.toml" if isinstance(error, OSError) else f"pyproject.toml: {error}"
    raise EngineError(f"{folder} holds no engine ({problem}). Name a checkout of {NAME}: make engine FROM=<folder>")


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_bytes(content)
    temporary.replace(path)


def main(arguments: list[str]) -> int:
    """Returns the exit code: 2 with a message where the engine will not do."""
    root = Path(__file__).resolve().parents[1]
    try:
        if arguments == ["check"]:
            check(root)
        elif len(arguments) == 2 and arguments[0] == "change" and arguments[1]:
            print(f"The engine is now {change(root, arguments[1])}.")
        else:
            raise EngineError("Which engine? make engine FROM=<wheel, folder or version>")
    except EngineError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{error.filename} can't be written: {error.strerror}. Check the disk and rights.", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
