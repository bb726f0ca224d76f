"""Checks that no docstring opens with a word that refers to something not there, such as "Of" or "Those".

    python tools/docstrings.py src

A docstring opens with a verb in the third person, or with a noun phrase that names the thing. Modules, classes,
functions and constants (a string below an assignment) are checked.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

REFERRING = frozenset(
    ("as", "behind", "beside", "by", "nobody", "of", "that", "those", "what", "whatever", "who", "whose")
)


def docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Yields strings that stand alone: docstrings, and texts below assignments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


def faults(path: Path) -> Iterator[str]:
    """Yields a line for each docstring of a file that opens with one of `REFERRING`."""
    for constant in docstrings(ast.parse(path.read_text(encoding="utf-8"))):
        text = str(constant.value).strip()
        word = text.partition(" ")[0].rstrip(",:").lower()
        if word in REFERRING:
            yield f"{path}:{constant.lineno}: opens with {word!r}: {text.partition(chr(10))[0][:80]}"


def main(folders: list[str]) -> int:
    """Prints the faults of all files below the folders and returns 1 if there are any."""
    found = [fault for folder in folders for path in sorted(Path(folder).rglob("*.py")) for fault in faults(path)]
    print("\n".join(found) or "docstrings: no fault")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
