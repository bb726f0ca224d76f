"""Real processes that meet right before the moment that a test is about, and then do the same at the same instant.

``python -m tests.kit.meeting FUNCTION SCRIPT WORDS`` runs a script of the project that meets the others in front of its
first call of a function, such as ``wellfed.run.folder.lock.only_one``.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pkgutil import resolve_name

from tests.end_to_end.commands import ROOT, Done, environment

_PATIENCE_S = 240.0
_FOLDER, _ME, _NUMBER = "MEETING_FOLDER", "MEETING_ME", "MEETING_NUMBER"
_GONE = "gone"
_HERE = [sys.executable, "-m", "tests.kit.meeting"]
_ELSEWHERE = ["unshare", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c"]


def meet(point: str, at_most_s: float | None = None) -> None:
    """Returns once each of the other processes is at this point too, or has ended.

    Args:
        point: a word.
        at_most_s: returns after this time in any case; None = the others must come.
    """
    folder, number = Path(os.environ[_FOLDER]), int(os.environ[_NUMBER])
    (folder / f"{os.environ[_ME]}.{point}").touch()
    end_s = time.monotonic() + (_PATIENCE_S if at_most_s is None else at_most_s)
    while len({path.stem for path in folder.iterdir() if path.suffix in (f".{point}", f".{_GONE}")}) < number:
        if time.monotonic() > end_s:
            assert at_most_s is not None, f"nobody came to {point}"
            return
        time.sleep(0.0005)


def meet_before(name: str, point: str, at_most_s: float | None = None) -> None:
    """Makes this process, and those that it forks later, `meet` the others before the first call of a function."""
    owner, _, attribute = name.rpartition(".")
    function, has_met = resolve_name(name), []

    def meeting(*arguments: object, **named: object) -> object:
        if not has_met:
            has_met.append(True)
            meet(point, at_most_s)
        return function(*arguments, **named)

    setattr(resolve_name(owner), attribute, meeting)


def together(
    commands: Sequence[Sequence[str] | str], folder: Path, *, cwd: Path | None = None, **variables: str
) -> list[Done]:
    """Runs commands at the same time, in which `meet` works, and returns how each has ended.

    Args:
        commands: a text is a Python program.
        folder: new folder for the meeting.
        variables: environment of all of them.
    """
    folder.mkdir(parents=True)
    paths = [str(ROOT / "src"), str(ROOT), variables.pop("PYTHONPATH", "")]
    shared = {**variables, "PYTHONPATH": os.pathsep.join(filter(None, paths)), _FOLDER: str(folder)}

    def ended(me: int) -> Done:
        words = commands[me]
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-c", words] if isinstance(words, str) else words,
                cwd=cwd or folder,
                env=environment(**shared, **{_ME: str(me), _NUMBER: str(len(commands))}),
                text=True,
                capture_output=True,
                timeout=_PATIENCE_S + 60,
            )
        finally:
            (folder / f"{me}.{_GONE}").touch()
        return Done(done.returncode, done.stdout, done.stderr)

    with ThreadPoolExecutor(len(commands)) as pool:
        return list(pool.map(ended, range(len(commands))))


def command(function: str, script: str, *words: str) -> list[str]:
    """Returns the command of a script below ``src/`` that meets the others in front of a function."""
    return [*_HERE, function, str(ROOT / "src" / script), *words]


def elsewhere(host: str, words: Sequence[str]) -> list[str]:
    """Returns a command on another machine, as far as the machine's name and its processes tell."""
    return [*_ELSEWHERE, f'echo {host} > /proc/sys/kernel/hostname && exec "$@"', "sh", *words]


def can_be_elsewhere() -> bool:
    """Returns whether this process may make a machine of `elsewhere`."""
    try:
        asked = subprocess.run(elsewhere("there", ["uname", "-n"]), capture_output=True, text=True, timeout=20)
    except OSError:
        return False
    return asked.stdout.strip() == "there"


def main(words: Sequence[str]) -> None:
    """Runs the script of a `command`."""
    function, script, *rest = words
    meet_before(function, "at")
    sys.argv = [script, *rest]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
