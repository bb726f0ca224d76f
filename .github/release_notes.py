"""The notes of a release: its section of CHANGELOG.md.

``python .github/release_notes.py v1.2.3`` prints them, or says why there can be no such release and exits with 1.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def notes(tag: str, changelog: str, version: str) -> str:
    """The section's text without its heading.

    Args:
        version: of pyproject.toml.

    Raises:
        ValueError: the tag, the version and the changelog do not agree.
    """
    if tag != f"v{version}":
        raise ValueError(f"the tag is {tag}, and pyproject.toml says {version}: one of them is wrong")
    heading = rf"^## \[{re.escape(version)}\][^\n]*\n"
    found = re.search(rf"{heading}(.*?)(?=^## |^\[[^\]]+\]: |\Z)", changelog, flags=re.MULTILINE | re.DOTALL)
    if not found or not found[1].strip():
        raise ValueError(f"CHANGELOG.md has nothing under ## [{version}]: move what is under Unreleased there")
    return found[1].strip() + "\n"


def main(tag: str) -> None:
    """Print the notes, or end with the reason."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    try:
        print(notes(tag, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version), end="")
    except ValueError as problem:
        sys.exit(f"no release: {problem}")


if __name__ == "__main__":
    main(sys.argv[1])
