"""The template as a repository of its own, and what is typed to make projects of it."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from tests.end_to_end.commands import Done

ROOT = Path(__file__).parents[2]
AUTHOR = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org", "-c", "commit.gpgsign=false")


def environment(home: Path, **more: str) -> dict[str, str]:
    """Returns variables with cookiecutter's clones, replays and settings below ``home``.

    Those of the git and the make that run the tests are left out: ``make test ARGS=...`` gives its ARGS to each make.
    """
    foreign = ("GIT_", "COOKIECUTTER", "WANDB_", "MAKE", "MFLAGS", "ARGS")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
    return {**kept, "HOME": str(home), "OMP_NUM_THREADS": "1", "COLUMNS": "200", **more}


def run(*command: str | Path, cwd: Path, home: Path, timeout_s: float = 120, **more: str) -> Done:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment(home, **more),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def git(folder: Path, *arguments: str) -> str:
    done = run("git", *AUTHOR, *arguments, cwd=folder, home=folder)
    assert done.code == 0, done.text
    return done.out


def commit(folder: Path, message: str) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", message)


def load(path: str) -> ModuleType:
    """A program of the template as a module: it belongs to no package."""
    name = path.removesuffix(".py").replace("/", "_")
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def copy_of_the_template(target: Path) -> Path:
    """The working tree as its next commit would have it, in a repository of its own with tag v1."""
    if (ROOT / ".git").exists():
        names = git(ROOT, "ls-files", "-co", "--exclude-standard", "-z").split("\0")
    else:  # unpacked from an archive
        names = load("tools/scaffold.py").paths(ROOT)
    for name in filter(None, names):
        if (ROOT / name).is_file():  # a file may be deleted and not yet committed
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    git(target, "init", "-q", "-b", "main")
    commit(target, "first")
    git(target, "tag", "v1")
    return target


def cookiecutter(template: str | Path, *arguments: str, cwd: Path, **more: str) -> Done:
    """``cookiecutter TEMPLATE ...`` as typed in ``cwd``, which stands for the home folder too."""
    return run(sys.executable, "-m", "cookiecutter", template, *arguments, cwd=cwd, home=cwd, **more)


def tree(folder: Path) -> dict[str, tuple[bytes, bool]]:
    """Path -> content and exec bit, without git's own files."""
    return {
        path.relative_to(folder).as_posix(): (path.read_bytes(), bool(path.stat().st_mode & 0o100))
        for path in folder.rglob("*")
        if path.is_file() and ".git" not in path.relative_to(folder).parts
    }
