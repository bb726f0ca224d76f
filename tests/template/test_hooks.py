"""The hooks by themselves: names that are refused, and where the template is looked for."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.template.commands import ROOT, commit, environment, git, load

pre = load("hooks/pre_gen_project.py")
post = load("hooks/post_gen_project.py")
GOOD = {
    "project_name": "My Nets",
    "project_slug": "my-nets",
    "package_name": "my_nets",
    "description": "",
    "author": "me",
    "workload": "blank",
    "wandb_entity": "",
}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"package_name": "a"},
        {"package_name": "n" * 60, "project_slug": "n" * 128},
        {"package_name": "n" * 30, "workload": "recsys"},
        {"package_name": "match"},  # a word of the grammar, but no keyword
        {"project_slug": "3d-nets", "package_name": "nets_3d"},
        {"project_slug": "My.Nets_2"},
        {"package_name": "recsys"},
        {"description": r"""quotes ' " ''' \""" and \ { % #""", "author": 'O"Neil'},
        {"wandb_entity": "my-team_2"},
    ],
)
def test_good_answers(given: dict[str, object]):
    assert pre.faults(GOOD | given) == []


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"project_name": "  "}, "project_name='  ': it must not be empty. Write project_name=\"My Nets\"."),
        ({"author": ""}, "author='': it must not be empty. Write author=\"your name\"."),
        ({"author": "a\x7f"}, "author='a\\x7f': it must be one line without control characters. Write it in one line."),
        (
            {"package_name": "3d_nets"},
            "package_name='3d_nets': letters a-z, digits and '_', with a letter first. Take package_name=my_3d_nets.",
        ),
        (
            {"package_name": "Nets"},
            "package_name='Nets': letters a-z, digits and '_', with a letter first. Take package_name=my_nets.",
        ),
        (
            {"package_name": "n" * 31, "workload": "recsys"},
            f"package_name='{'n' * 31}': it has 31 characters, and 30 is the most for a copy of recsys. "
            f"Take package_name=my_{'n' * 27}.",
        ),
        (
            {"project_slug": "n" * 129},
            f"project_slug='{'n' * 129}': it has 129 characters, and wandb takes 128 for the name of a project. "
            f"Take project_slug=my-{'n' * 27}.",
        ),
        ({"package_name": "class"}, "package_name='class': it is a keyword of Python. Take package_name=my_class."),
        (
            {"package_name": "json"},
            "package_name='json': it is a module of Python's standard library. Take package_name=my_json.",
        ),
        (
            {"package_name": "torch"},
            "package_name='torch': it is a library that the project uses. Take package_name=my_torch.",
        ),
        (
            {"package_name": "wellfed"},
            "package_name='wellfed': the project itself uses this name. Take package_name=my_wellfed.",
        ),
        (
            {"package_name": "null"},
            "package_name='null': yaml, Hydra or Windows read it as something else than a name. "
            "Take package_name=my_null.",
        ),
        (
            {"project_slug": "hydra-core"},
            "project_slug='hydra-core': a project of this name would take the place of something that it is made of. "
            "Take project_slug=my-hydra-core.",
        ),
        (
            {"project_slug": "../x"},
            "project_slug='../x': letters a-z, digits, '-', '_', '.', with a letter or digit at both ends. "
            "Take project_slug=my-x.",
        ),
        (
            {"project_slug": "con"},
            "project_slug='con': Windows can't have a folder of this name. Take project_slug=my-con.",
        ),
        (
            {"wandb_entity": "a/b"},
            "wandb_entity='a/b': a wandb user or team has letters a-z, digits, '-', '_' and '.' only. "
            "Leave it empty for wandb's default.",
        ),
    ],
)
def test_bad_answers(given: dict[str, object], fault: str):
    assert pre.faults(GOOD | given) == [fault]


def test_all_faults_are_told_at_once():
    assert len(pre.faults(GOOD | {"author": "", "package_name": "on", "project_slug": "-"})) == 3


@pytest.mark.parametrize(
    "name", ["3d_nets", "n" * 31, "_x", "a-b", "é", "", "torch", "on", "import", "Äpfel und Birnen"]
)
def test_what_is_suggested_is_taken(name: str):
    for fault in pre.faults(GOOD | {"package_name": name, "project_slug": name}):
        (key, suggestion) = re.findall(r"Take (\w+)=(.+)\.$", fault)[0]
        assert pre.faults(GOOD | {key: suggestion}) == []


def test_libraries_are_refused_as_pip_knows_them():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {re.split(r"[\[<>=]", entry)[0].replace("-", "_") for entry in wanted if not entry.startswith("types-")}
    assert names - {"cookiecutter", "cruft", "wellfed"} <= pre.DISTRIBUTIONS


def test_libraries_are_refused_as_the_code_knows_them():
    """Every package that a file of src imports."""
    packages = set()
    for path in (ROOT / "src").rglob("*.py"):  # one tree at a time: all at once are millions of objects
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                packages |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                packages.add(node.module.partition(".")[0])
    foreign = packages - sys.stdlib_module_names - pre.PROJECT
    assert {"torch", "omegaconf"} <= foreign <= pre.LIBRARIES


def test_names_that_the_project_uses_are_refused(template: Path):
    scaffold = load("tools/scaffold.py")
    paths = scaffold.project_files(scaffold.read(template), ANSWERS)
    names = {path.split("/")[0] for path in paths} | {path.split("/")[1] for path in paths if path.startswith("src/")}
    plain = {name.removesuffix(".py") for name in names if re.fullmatch(r"[a-z]+(\.py)?", name)}
    assert {"configs", "vendor", "train"} <= plain <= pre.PROJECT
    engine = {path.name for path in (ROOT / "src").iterdir() if path.suffix in ("", ".py")}
    assert {name.removesuffix(".py") for name in engine} <= pre.PROJECT


def test_choices_are_those_of_the_configuration():
    asked = json.loads((ROOT / "cookiecutter.json").read_text())
    stems = {
        folder: {path.stem for path in (ROOT / "configs" / folder).glob("*.yaml")} for folder in ("gpu", "workload")
    }
    assert set(asked["gpu"]) == stems["gpu"]
    assert set(asked["workload"]) == {"blank"} | stems["workload"]
    assert (
        stems["workload"]
        == pre.EXAMPLES
        == {path.name for path in (ROOT / "src/workloads").iterdir()} - {"__pycache__"}
    )
    assert set(asked["license"]) == {path.stem for path in (ROOT / "tools/licenses").iterdir()}
    defaults = yaml.safe_load((ROOT / "configs/train.yaml").read_text())["defaults"]
    assert {"gpu": asked["gpu"][0]} in defaults
    assert yaml.safe_load((ROOT / "configs/logger/wandb.yaml").read_text())["mode"] == asked["wandb_mode"][0]
    for key, prompt in asked["__prompts__"].items():
        if isinstance(asked[key], list):
            assert list(prompt) == ["__prompt__", *asked[key]]
    assert list(asked["__prompts__"]) == [key for key in asked if not key.startswith("_")]


# ---- finding the template ----


@pytest.fixture
def here(tmp_path: Path) -> Path:
    folder = tmp_path / "here"
    (folder / "tools").mkdir(parents=True)
    (folder / "tools/scaffold.py").write_text("")
    (folder / "cookiecutter.json").write_text("{}")
    return folder


def test_what_counts_as_a_template(here: Path):
    assert post.is_template(here)
    (here / "cookiecutter.json").unlink()
    assert not post.is_template(here)


def test_where_it_is_looked_for(here: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(post, "parents_folder", lambda pid: Path("/parent"))
    monkeypatch.setenv("PWD", "/pwd")
    relative = {"_repo_dir": "t", "_output_dir": "/out"}
    assert list(post.candidates(relative)) == [Path("/parent"), Path("/pwd/t"), Path("/out/t")]
    assert next(post.candidates({"_repo_dir": "/t"})) == Path("/t")
    assert list(post.candidates({})) == [Path("/parent")]  # cruft

    def unknown(pid: int) -> Path:
        raise OSError

    monkeypatch.setattr(post, "parents_folder", unknown)
    assert list(post.candidates({})) == []


def test_the_folder_of_a_process(tmp_path: Path):
    with subprocess.Popen(["sleep", "60"], cwd=tmp_path) as process:
        try:
            assert post.parents_folder(process.pid) == tmp_path.resolve()
        finally:
            process.kill()
    with pytest.raises(FileNotFoundError):
        post.parents_folder(process.pid)


def test_the_folder_of_a_process_as_lsof_tells_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As on macOS."""
    monkeypatch.setattr(Path, "exists", lambda path: False)
    monkeypatch.setenv("PATH", str(tmp_path))
    lsof = tmp_path / "lsof"
    lsof.write_text('#!/bin/sh\ntest "$*" = "-a -p 7 -d cwd -Fn" && printf "p7\\nfcwd\\nn/where it is\\n"\n')
    lsof.chmod(0o755)
    assert post.parents_folder(7) == Path("/where it is")
    with pytest.raises(OSError, match="lsof does not tell the working folder of process 8"):
        post.parents_folder(8)


def hook(answers: dict[str, object], project: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """The hook as cookiecutter leaves it, run where nothing but the answers says where the template is."""
    script = project.parent / "hook.py"
    text = (ROOT / "hooks/post_gen_project.py").read_text()
    script.write_text(text.replace("{{ cookiecutter | tojson }}", json.dumps(answers)))
    return subprocess.run(
        [sys.executable, str(script)],
        cwd=project,
        env=environment(project.parent, **more),
        capture_output=True,
        text=True,
    )


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project, beside tests that stand in no template."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "project").mkdir()
    return tmp_path / "project"


ANSWERS = GOOD | {"license": "MIT", "gpu": "auto", "wandb_mode": "auto"}


def test_the_last_resort_is_a_clone_of_the_commit(template: Path, own_template: Path, project: Path):
    old = git(own_template, "rev-parse", "HEAD").strip()
    (own_template / "docs/newer.md").write_text("newer\n")
    commit(own_template, "newer")
    made = ANSWERS | {"_template": f"file://{own_template}", "_commit": old}
    done = hook(made, project, PWD="/", GIT_DIR=str(template / ".git"))
    assert done.returncode == 0, done.stderr
    assert (project / "src/my_nets/model.py").is_file()
    assert not (project / "docs/newer.md").exists()


def test_no_template_anywhere(project: Path):
    done = hook(ANSWERS | {"_template": str(project.parent / "gone"), "_repo_dir": "gone"}, project, PWD="/")
    assert done.returncode == 1
    assert "The template was not found again from its hook: not in" in done.stderr
    assert "cookiecutter /path/to/template" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(project.iterdir()) == []


def test_hooks_render_their_answers_and_nothing_else():
    hooks = {path.name: path.read_text() for path in (ROOT / "hooks").glob("*.py")}
    assert set(hooks) == {"pre_gen_project.py", "post_gen_project.py"}
    for text in hooks.values():
        assert re.findall(r"\{[{%#].*", text) == ['{{ cookiecutter | tojson }}"""']
