"""Projects made by the real cookiecutter, from a folder, a git URL and over an older project."""

import re
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.template.commands import Done, commit, cookiecutter, git, run, tree

pytestmark = pytest.mark.slow  # what goes into a project: test_scaffold.py; names: test_hooks.py

AWKWARD = {
    "project_name": "Réseau 4 GPU!",
    "description": r"""It's "quoted" \back\slash\ ''' three \""" and 100 % of #1 <&>""",
    "author": r'Zoë "Z" O\'Neil',
    "license": "BSD-3-Clause",
    "gpu": "24gb",
    "workload": "recsys",
    "wandb_mode": "offline",
    "wandb_entity": "my-team",
}


def answers(**given: str) -> list[str]:
    return ["--no-input", *(f"{key}={value}" for key, value in given.items())]


def made(done: Done, folder: Path) -> Path:
    assert done.code == 0, done.text
    assert (folder / "engine.txt").is_file(), done.text
    return folder


@pytest.fixture(scope="module")
def default(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project of ``--no-input``."""
    cwd = tmp_path_factory.mktemp("default")
    return made(cookiecutter(template, "--no-input", cwd=cwd), cwd / "my-nets")


@pytest.fixture(scope="module")
def awkward(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project of awkward answers from a git URL, at a tag that is not the newest commit."""
    cwd = tmp_path_factory.mktemp("awkward")
    bare = cwd / "template.git"
    git(cwd, "clone", "-q", "--bare", str(template), str(bare))
    newer = cwd / "newer"
    git(cwd, "clone", "-q", str(bare), str(newer))
    (newer / "configs/loader/newer.yaml").write_text("backend: auto\n")
    commit(newer, "newer")
    git(newer, "push", "-q")
    url = f"file://{bare}"
    return made(cookiecutter(url, "--checkout", "v1", *answers(**AWKWARD), cwd=cwd), cwd / "reseau-4-gpu")


def options(project: Path, name: str) -> dict[str, object]:
    return yaml.safe_load((project / "configs" / name).read_text(encoding="utf-8"))


def test_the_default_project_is_its_owners(default: Path):
    assert {path.name for path in (default / "src").iterdir()} == {"evaluate.py", "my_nets", "train.py", "tune.py"}
    assert (default / "README.md").read_text().startswith("# My Nets\n\nExperiments with Hydra and Lightning.\n")
    project = tomllib.loads((default / "pyproject.toml").read_text())["project"]
    assert (project["name"], project["license"]) == ("my-nets", "MIT")
    assert {"workload": "my_nets"} in options(default, "train.yaml")["defaults"]
    assert options(default, "workload/my_nets.yaml")["model"]["_target_"] == "my_nets.model.Network"
    assert options(default, "logger/wandb.yaml") == {"mode": "auto", "project": "my-nets", "entity": None}
    assert "Copyright (c) The My Nets authors\n" in (default / "LICENSE").read_text()
    files = tree(default)
    assert len(files) < 100
    assert sum(content.count(b"\n") for path, (content, _) in files.items() if not path.endswith(".whl")) < 1500


def test_the_engine_comes_along(default: Path, template: Path, tmp_path: Path):
    (wheel,) = (default / "vendor").iterdir()
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name and ".data" not in name} == {
        *("wellfed", "hydra_plugins"),
    }
    assert any(name.endswith("share/wellfed/findings/healthy.md") for name in names)
    code = {path.relative_to(template / "src").as_posix() for path in (template / "src/wellfed").rglob("*.py")}
    assert code <= set(names)
    done = run(sys.executable, "tools/engine.py", "check", cwd=default, home=tmp_path)
    assert done.code == 0, done.text


def test_no_trace_of_the_template(default: Path, template: Path):
    """In names of files and in texts."""
    examples = "|".join(path.name for path in (template / "src/workloads").iterdir())
    words = rf"\b(?:{examples})(?:\b|_)|cookiecutter|scaffold|benchmarks/|src/wellfed|\{{\{{ made"
    traces = re.compile(words.encode())
    found = {
        path: trace[0]
        for path, (content, _) in tree(default).items()
        if not path.endswith(".whl") and (trace := traces.search(path.encode() + b"\n" + content))
    }
    assert found == {"constraints.txt": b"cookiecutter"}  # pins are those of the template, and bind nothing


def test_awkward_answers(awkward: Path):
    assert not (awkward / "configs/loader/newer.yaml").exists()  # --checkout v1
    project = tomllib.loads((awkward / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["description"] == AWKWARD["description"]
    assert project["authors"] == [{"name": AWKWARD["author"]}]
    assert {"gpu": "24gb"} in options(awkward, "train.yaml")["defaults"]
    expected = {"mode": "offline", "project": "reseau-4-gpu", "entity": "my-team"}
    assert options(awkward, "logger/wandb.yaml") == expected
    assert (awkward / "configs/experiment/reseau_4_gpu_8gb.yaml").is_file()
    assert not [path for path in tree(awkward) if "recsys" in path]
    for check in (["format", "--check"], ["check"]):
        done = run(sys.executable, "-m", "ruff", *check, "--no-cache", ".", cwd=awkward, home=awkward.parent)
        assert done.code == 0, done.text


@pytest.mark.parametrize("given", [{"package_name": "3d_nets"}, {"project_name": "click"}])
def test_bad_answers_leave_nothing(given: dict[str, str], template: Path, tmp_path: Path):
    work = tmp_path / "work"
    work.mkdir()
    done = cookiecutter(template, *answers(**given), cwd=work)
    assert done.code == 1
    assert "Take " in done.err
    assert [path.name for path in work.iterdir() if path.name not in (".cookiecutters", ".cookiecutter_replay")] == []
