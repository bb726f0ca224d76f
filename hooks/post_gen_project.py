"""cookiecutter runs this in the new project after it has written the files that differ: finds the template, hands over.

All that is done to the project is in the template's tools/scaffold.py. cookiecutter and cruft run a hook from a file of
its own, away from the template.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

ANSWERS = r"""{{ cookiecutter | tojson }}"""
"""Filled in by cookiecutter. ``tojson`` leaves no character that could end this text, whatever was answered."""


def candidates(answers: Mapping[str, object]) -> Iterator[Path]:
    """Yields the folders that may be the template. A relative one is relative to where cookiecutter was started: PWD,
    or ``_output_dir`` unless another was chosen."""
    if said := str(answers.get("_repo_dir") or ""):
        yield from (Path(str(base)) / said for base in (os.environ.get("PWD"), answers.get("_output_dir")) if base)


def clone(answers: Mapping[str, object], target: Path) -> None:
    """Clones the template, as cruft needs it, at the commit that was named. A failure leaves no folder."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    environment["GIT_TERMINAL_PROMPT"] = "0"  # a hook never asks
    commit = str(answers.get("_commit") or answers.get("_checkout") or "HEAD")
    git = ["git", "-c", "safe.directory=*"]
    address = str(answers.get("_template") or "")
    for command in (
        [*git, "clone", "--quiet", "--no-checkout", "--", address, str(target)],
        [*git, "-C", str(target), "checkout", "--quiet", "--detach", commit],
    ):
        with suppress(OSError):  # no git
            if subprocess.run(command, env=environment, check=False).returncode != 0:
                return


def main(text: str) -> int:
    """Runs the scaffold and returns its exit code; 1, with a message, if no template was found."""
    answers = json.loads(text)
    with tempfile.TemporaryDirectory(prefix="template-") as made:
        cloned = Path(made) / "template"
        found = [folder for folder in candidates(answers) if (folder / "tools" / "scaffold.py").is_file()]
        if not found:
            clone(answers, cloned)
        folder = found[0] if found else cloned
        if not (folder / "tools" / "scaffold.py").is_file():
            print(
                "The template was not found again. Clone it and give cookiecutter that folder with its whole path: "
                "cookiecutter /path/to/template",
                file=sys.stderr,
            )
            return 1
        scaffold = [sys.executable, "-I", str(folder / "tools" / "scaffold.py"), os.getcwd()]
        return subprocess.run(scaffold, input=text, encoding="utf-8", check=False).returncode


if __name__ == "__main__":
    sys.exit(main(ANSWERS))
