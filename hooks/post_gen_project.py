"""cookiecutter runs this in the new project after it has written the files that differ: finds the template, hands over.

All that is done to the project is in the template's tools/scaffold.py. cookiecutter and cruft run a hook from a file of
its own, away from the template, and say only in part where that is.
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


def is_template(folder: Path) -> bool:
    """Returns whether the folder holds this kind of template, not a leftover or an unrelated repository."""
    return (folder / "cookiecutter.json").is_file() and (folder / "tools" / "scaffold.py").is_file()


def candidates(answers: Mapping[str, object]) -> Iterator[Path]:
    """Yields the folders that may be the template, the surest first.

    A relative ``_repo_dir`` is relative to where cookiecutter was started. The parent process stands in the template
    itself, so it is asked before PWD, which a script that changes folders leaves behind; where it can't be asked, PWD
    and ``_output_dir`` (which is that folder unless one was chosen) are what is left.
    """
    said = str(answers.get("_repo_dir") or "")
    if said and Path(said).is_absolute():
        yield Path(said)
    with suppress(OSError):
        yield parents_folder(os.getppid())
    if said:
        yield from (Path(str(base)) / said for base in (os.environ.get("PWD"), answers.get("_output_dir")) if base)


def parents_folder(pid: int) -> Path:
    """Returns the working folder of a process.

    Raises:
        OSError: the system does not tell.
    """
    if Path("/proc/self/cwd").exists():
        return Path(os.readlink(f"/proc/{pid}/cwd"))
    ask = ["lsof", "-a", "-p", str(pid), "-d", "cwd", "-Fn"]
    told = subprocess.run(ask, capture_output=True, text=True, check=False)
    names = [line[1:] for line in told.stdout.splitlines() if line.startswith("n/")]
    if not names:
        raise OSError(f"lsof does not tell the working folder of process {pid}")
    return Path(names[0])


def clone(answers: Mapping[str, object], target: Path) -> str:
    """Clone what was named as the template at the commit that was named; what git said if that failed."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    environment["GIT_TERMINAL_PROMPT"] = "0"  # a hook never asks
    commit = str(answers.get("_commit") or answers.get("_checkout") or "HEAD")
    git = ["git", "-c", "safe.directory=*"]
    for command in (
        [*git, "clone", "--quiet", "--no-checkout", "--", str(answers.get("_template") or ""), str(target)],
        [*git, "-C", str(target), "checkout", "--quiet", "--detach", commit],
    ):
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        except OSError as error:
            return f"git can't be run: {error.strerror}"
        if done.returncode != 0:
            return done.stderr.strip()
    return ""


def main(text: str) -> int:
    """Runs the scaffold and returns its exit code; 1, with a message, if no template was found."""
    answers = json.loads(text)
    with tempfile.TemporaryDirectory(prefix="template-") as made:
        looked_at = []
        for folder in candidates(answers):
            if is_template(folder):
                break
            looked_at.append(str(folder))
        else:
            folder = Path(made) / "template"
            failure = clone(answers, folder)
            if failure or not is_template(folder):
                print(
                    f"The template was not found again from its hook: not in {', '.join(looked_at) or 'any folder'}, "
                    f"and a clone of {answers.get('_template')!r} was none ({failure or 'no tools/scaffold.py in it'})."
                    "\nClone the template yourself and give cookiecutter that folder: cookiecutter /path/to/template",
                    file=sys.stderr,
                )
                return 1
        scaffold = [sys.executable, "-I", str(folder / "tools" / "scaffold.py"), "fill", os.getcwd()]
        return subprocess.run(scaffold, input=text, encoding="utf-8", check=False).returncode


if __name__ == "__main__":
    sys.exit(main(ANSWERS))
