"""A new project with its engine installed from vendor/, as a user types its commands."""

import json
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest

from tests.template.commands import Done, commit, cookiecutter, git, run, tree

pytestmark = pytest.mark.slow
EXAMPLES = ("forecast", "hyperspectral", "recsys", "restoration", "speech")
QUICK = ("gpu=cpu", "trainer.max_steps=3", "trainer.limit_batches=2", "logger=none", "telemetry=none")


class Project:
    """A project in a repository of its own, with an environment that sees the packages of the tests."""

    def __init__(self, root: Path) -> None:
        self.root = root
        git(root, "init", "-q", "-b", "main")
        commit(root, "first")
        venv.create(root / ".venv", with_pip=False)
        (site,) = (root / ".venv/lib").glob("python*/site-packages")
        packages = [path for path in sys.path if Path(path).name == "site-packages"]
        (site / "of_the_tests.pth").write_text("\n".join(packages))
        self.site = site
        done = self.pip("install", "-q", "--no-deps", "--force-reinstall", "-r", "engine.txt")
        assert done.code == 0, done.text

    def pip(self, *words: str) -> Done:
        python = str(self.root / ".venv/bin/python")
        return run(sys.executable, "-m", "pip", "--python", python, *words, cwd=self.root, home=self.root.parent)

    def python(self, *words: str | Path, timeout_s: float = 300, cwd: Path | None = None) -> Done:
        return self.run(".venv/bin/python", *words, timeout_s=timeout_s, cwd=cwd)

    def run(self, *words: str | Path, timeout_s: float = 300, cwd: Path | None = None) -> Done:
        more = {"WELLFED_PROJECT": "", "PYTHONPATH": ""}
        words = (self.root / words[0], *words[1:])
        return run(*words, cwd=cwd or self.root, home=self.root.parent, timeout_s=timeout_s, **more)

    def record(self) -> dict[str, Any]:
        """run.json of the newest run."""
        return json.loads(max(self.root.glob("logs/*/runs/*/run.json")).read_text())


@pytest.fixture(scope="module")
def project(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A blank one, in a folder with blanks and more than ASCII."""
    cwd = tmp_path_factory.mktemp("neue Netze ü")
    done = cookiecutter(template, "--no-input", cwd=cwd)
    assert done.code == 0, done.text
    return Project(cwd / "my-nets")


def test_it_trains_on_the_engine_of_its_environment(project: Project):
    """Nothing but compiled templates is written beside the engine; the record has the project's commit."""
    engine = project.site / "wellfed"
    for path in [engine, *engine.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = tree(engine)
    done = project.python("src/train.py", *QUICK)
    assert done.code == 0, done.text
    record = project.record()
    assert (record["status"], record["steps"]) == ("ok", 3)
    assert (record["git"]["commit"], record["git"]["dirty"]) == (git(project.root, "rev-parse", "HEAD").strip(), False)
    version = (project.root / "engine.txt").read_text().partition("wellfed==")[2].split()[0]
    assert record["engine"] == {"version": version, "commit": None, "dirty": False, "within_project": False}
    after = tree(engine)
    compiled = {path for path in after if path.startswith("explain/pages/__pycache__/") and path.endswith(".jinja")}
    assert {path: kept for path, kept in after.items() if path not in compiled} == before


def test_a_day_with_a_project(project: Project):
    """A workload is added and trained, a sweep is measured, its winner chosen; a tune."""
    done = project.run(".venv/bin/wellfed", "add", "workload", "cats")
    assert done.code == 0, done.text
    done = project.run(".venv/bin/wellfed", "train", "workload=cats", *QUICK)
    assert done.code == 0, done.text
    few = ("gpu=cpu", "logger=none", "sweep.trial_steps=20")
    done = project.python("src/train.py", "-m", "sweep=quick", "loader=baseline,balanced", *few, timeout_s=600)
    assert done.code == 0, done.text
    (board,) = project.root.glob("logs/my_nets/sweeps/*/leaderboard.csv")
    done = project.run(".venv/bin/wellfed", "choose", board.parent, "--name", "mine")
    assert done.code == 0, done.text
    assert (project.root / "configs/experiment/mine.yaml").is_file()
    done = project.run(".venv/bin/wellfed", "tune", *few, "tune.max_minutes=1", "tune.max_trials=2", timeout_s=600)
    assert done.code == 0, done.text


@pytest.mark.parametrize("workload", ["blank", *EXAMPLES])
def test_the_project_passes_its_own_checks(workload: str, template: Path, tmp_path: Path):
    """`make check`, `make test`, `make train`; its environment sees the packages of the tests."""
    done = cookiecutter(template, "--no-input", f"workload={workload}", "package_name=" + "n" * 30, cwd=tmp_path)
    assert done.code == 0, done.text
    project = Project(tmp_path / "my-nets")
    programs = Path(sysconfig.get_path("scripts"))
    for tool in ("ruff", "mypy"):
        (project.root / ".venv/bin" / tool).symlink_to(programs / tool)
    for stamp in (".installed", ".installed-dev"):
        (project.root / ".venv" / stamp).touch()
    for command in (["check"], ["test"], ["train", f"ARGS={' '.join(QUICK)}"]):
        more = {"WELLFED_PROJECT": "", "PYTHONPATH": ""}
        done = run("make", *command, cwd=project.root, home=tmp_path, timeout_s=900, **more)
        assert done.code == 0, done.text
    assert project.record()["steps"] == 3
    assert git(project.root, "status", "--porcelain") == ""
