"""Writes the engine's wheel from the template's files, as setuptools does, with the standard library alone.

    python tools/wheel.py FOLDER

A new project gets its wheel this way, without network or setuptools. The same files give the same bytes on every
machine: nothing is compressed, since zlib differs by version. git compresses the wheel, and keeps the next one as what
changed.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
import runpy
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

PACKAGES = ("src/wellfed/", "src/hydra_plugins/")
"""Folders of the engine; Hydra finds plugins only in the namespace of the second."""
DATA = {"docs/findings/": "share/wellfed/findings/"}
"""Folder of the template -> folder of the environment that pip puts its Markdown files into."""
OLDEST = (1980, 1, 1, 0, 0, 0)
"""Time of all entries: the earliest that a zip archive can hold."""


def build(files: Mapping[str, bytes]) -> tuple[str, bytes]:
    """Returns the name and content of the wheel.

    Args:
        files: of the template, by path from its root; only `PACKAGES`, `DATA`, pyproject.toml, README.md and LICENSE
            count.
    """
    project = tomllib.loads(files["pyproject.toml"].decode("utf-8"))["project"]
    name, version = project["name"], project["version"]
    info = f"{name}-{version}.dist-info"
    entries = {path.removeprefix("src/"): files[path] for path in files if path.startswith(PACKAGES)}
    tops = sorted({path.partition("/")[0] for path in entries})
    for source, folder in DATA.items():
        found = [path for path in files if path.startswith(source) and path.endswith(".md")]
        entries |= {f"{name}-{version}.data/data/{folder}{path.removeprefix(source)}": files[path] for path in found}
    entries |= {
        f"{info}/METADATA": _metadata(project, files["README.md"].decode("utf-8")),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tools/wheel.py\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/licenses/LICENSE": files["LICENSE"],
        f"{info}/top_level.txt": "".join(f"{top}\n" for top in tops).encode(),
    }
    if scripts := project.get("scripts"):
        lines = [f"{command} = {target}\n" for command, target in sorted(scripts.items())]
        entries[f"{info}/entry_points.txt"] = "".join(["[console_scripts]\n", *lines]).encode()
    record = f"{info}/RECORD"
    # Line ends of a checkout on Windows would change the bytes.
    entries = {path: _unix(content) for path, content in sorted(entries.items())}
    entries[record] = "".join([*map(_record_line, entries.items()), f"{record},,\n"]).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, content in entries.items():
            entry = zipfile.ZipInfo(path, OLDEST)
            entry.create_system = 3  # Unix, wherever it is written
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content)
    return f"{name}-{version}-py3-none-any.whl", buffer.getvalue()


def _unix(content: bytes) -> bytes:
    return content if b"\0" in content else content.replace(b"\r\n", b"\n")


def _record_line(entry: tuple[str, bytes]) -> str:
    path, content = entry
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{path},sha256={digest},{len(content)}\n"


def _metadata(project: Mapping[str, Any], readme: str) -> bytes:
    """Returns the core metadata, in setuptools' order."""
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {project['name']}",
        f"Version: {project['version']}",
        f"Summary: {project['description']}",
        f"License-Expression: {project['license']}",
        *(f"Project-URL: {label}, {url}" for label, url in project.get("urls", {}).items()),
        *(f"Classifier: {classifier}" for classifier in project.get("classifiers", [])),
        f"Requires-Python: {project['requires-python']}",
        "Description-Content-Type: text/markdown",
        "License-File: LICENSE",
        *_requirements(project["dependencies"], ""),
    ]
    for extra, wanted in project.get("optional-dependencies", {}).items():
        lines += [f"Provides-Extra: {extra}", *_requirements(wanted, f'extra == "{extra}"')]
    return "\n".join([*lines, "Dynamic: license-file", "", readme]).encode("utf-8")


def _requirements(wanted: Iterable[str], extra: str) -> list[str]:
    lines = []
    for text in wanted:
        requirement, _, marker = (part.strip() for part in text.partition(";"))
        found = re.fullmatch(r"([\w.-]+)(?:\[([^\]]*)\])?\s*(.*)", requirement)
        assert found is not None, text
        name, extras, versions = (found[group] or "" for group in (1, 2, 3))
        extras = f"[{_sorted(extras)}]" if extras else ""
        condition = " and ".join(filter(None, [marker, extra]))
        lines.append(f"Requires-Dist: {name}{extras}{_sorted(versions)}" + (f"; {condition}" if condition else ""))
    return lines


def _sorted(listed: str) -> str:
    return ",".join(sorted(each.strip() for each in listed.split(",")))


def main(folder: str) -> None:
    """Writes the wheel of this tree and prints its path."""
    scaffold = runpy.run_path(str(Path(__file__).with_name("scaffold.py")))
    name, content = build({path: file.content for path, file in scaffold["read"](scaffold["TEMPLATE"]).items()})
    Path(folder).mkdir(parents=True, exist_ok=True)
    path = Path(folder) / name
    path.write_bytes(content)
    print(path)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"{sys.argv[1:]}: one folder is expected. Write python tools/wheel.py dist")
    main(sys.argv[1])
