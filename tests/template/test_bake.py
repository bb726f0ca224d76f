"""Projects made by the real cookiecutter, from every place that it takes a template from."""

import re
import shutil
import socket
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.kit.few import few, slow
from tests.kit.meeting import together
from tests.template.commands import Done, commit, cookiecutter, git, load, run, tree

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
EXAMPLES: set[str] = load("hooks/pre_gen_project.py").EXAMPLES
LONGEST, LONGEST_COPY = "n" * 60, "n" * 30


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
    files = tree(default)
    assert {path.name for path in (default / "src").iterdir()} == {"evaluate.py", "my_nets", "train.py", "tune.py"}
    assert {"model.py", "data.py", "README.md", "__init__.py"} == {
        path.name for path in (default / "src/my_nets").iterdir()
    }
    assert {path.split("/")[1] for path in files if path.startswith("tests/")} == {
        "conftest.py",
        "my_nets",
        "test_workloads.py",
    }
    assert (default / "README.md").read_text().startswith("# My Nets\n\nExperiments with Hydra and Lightning.\n")
    project = tomllib.loads((default / "pyproject.toml").read_text())["project"]
    assert (project["name"], project["license"]) == ("my-nets", "MIT")
    assert project["authors"] == [{"name": "The My Nets authors"}]
    assert {"workload": "my_nets"} in options(default, "train.yaml")["defaults"]
    assert options(default, "workload/my_nets.yaml")["model"]["_target_"] == "my_nets.model.Network"
    assert options(default, "logger/wandb.yaml") == {"mode": "auto", "project": "my-nets", "entity": None}
    assert "Copyright (c) The My Nets authors\n" in (default / "LICENSE").read_text()


def test_it_is_small(default: Path):
    files = tree(default)
    lines = sum(content.count(b"\n") for path, (content, _) in files.items() if not path.endswith(".whl"))
    print(f"{len(files)} files, {lines} lines")
    assert len(files) < 100
    assert lines < 1500


def test_the_engine_comes_along(default: Path, template: Path, tmp_path: Path):
    """As tools/wheel.py writes it, named by engine.txt."""
    done = run(sys.executable, "tools/wheel.py", tmp_path, cwd=template, home=tmp_path)
    wheel = Path(done.out.strip())
    assert (default / "vendor" / wheel.name).read_bytes() == wheel.read_bytes()
    assert [path.name for path in (default / "vendor").iterdir()] == [wheel.name]
    done = run(sys.executable, "tools/engine.py", "check", cwd=default, home=tmp_path)
    assert done.code == 0, done.text


def test_no_trace_of_the_template(default: Path, template: Path):
    """In names of files and in texts."""
    examples = "|".join(path.name for path in (template / "src/workloads").iterdir())
    words = rf"\b(?:{examples})(?:\b|_)|cookiecutter|scaffold|\bmake new\b|benchmarks/|src/wellfed|\{{\{{ made"
    traces = re.compile(words.encode())
    found = {
        path: trace[0]
        for path, (content, _) in tree(default).items()
        if not path.endswith(".whl") and (trace := traces.search(path.encode() + b"\n" + content))
    }
    assert found == {"constraints.txt": b"cookiecutter"}  # pins are those of the template, and bind nothing


def test_what_is_copied_is_not_rendered(default: Path, template: Path):
    assert "${{ matrix.python }}" in (default / ".github/workflows/ci.yml").read_text()
    assert (default / "configs/hydra/default.yaml").read_text().count("${") > 3
    assert b"{{" in (template / "hooks/post_gen_project.py").read_bytes()


@pytest.mark.slow
def test_links_of_all_pages_lead_somewhere(default: Path, awkward: Path):
    for project in (default, awkward):
        for page in [*project.glob("*.md"), *project.glob("src/*/README.md")]:
            for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
                assert target.startswith("https://") or (page.parent / target).exists(), f"{page}: {target}"


def test_awkward_answers(awkward: Path):
    assert not (awkward / "configs/loader/newer.yaml").exists()  # --checkout v1
    project = tomllib.loads((awkward / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == "reseau-4-gpu"
    assert project["description"] == AWKWARD["description"]
    assert project["authors"] == [{"name": AWKWARD["author"]}]
    readme = (awkward / "README.md").read_text(encoding="utf-8")
    assert readme.startswith(f"# {AWKWARD['project_name']}\n\n{AWKWARD['description']}\n")
    assert (awkward / "LICENSE").read_text(encoding="utf-8").startswith(f"Copyright (c) {AWKWARD['author']}\n")
    assert {"gpu": "24gb"} in options(awkward, "train.yaml")["defaults"]
    expected = {"mode": "offline", "project": "reseau-4-gpu", "entity": "my-team"}
    assert options(awkward, "logger/wandb.yaml") == expected


def test_an_example_is_copied(awkward: Path, template: Path):
    ours = {path.name for path in (template / "src/workloads/recsys").iterdir()}
    assert {path.name for path in (awkward / "src/reseau_4_gpu").iterdir()} == ours
    assert (awkward / "configs/experiment/reseau_4_gpu_8gb.yaml").is_file()
    assert not [path for path in tree(awkward) if "recsys" in path]
    for path, (content, _) in (tree(awkward / "src/reseau_4_gpu") | tree(awkward / "tests/reseau_4_gpu")).items():
        assert b"recsys" not in content, path
        assert b"workloads" not in content, path
    model = options(awkward, "workload/reseau_4_gpu.yaml")["model"]
    assert model["_target_"] == "reseau_4_gpu.model.TwoTowerRecommender"


@pytest.mark.parametrize(
    ("workload", "package"),
    [
        slow("blank", LONGEST),
        ("recsys", LONGEST_COPY),
        slow("recsys", "a"),
        *(slow(example, package) for example in sorted(EXAMPLES - {"recsys"}) for package in (LONGEST_COPY, "a")),
    ],
)
def test_any_name_passes_format_and_lint(workload: str, package: str, template: Path, tmp_path: Path):
    """Names change the length of lines."""
    project = made(
        cookiecutter(template, *answers(package_name=package, workload=workload), cwd=tmp_path), tmp_path / "my-nets"
    )
    for check in (["format", "--check"], ["check"]):
        done = run(sys.executable, "-m", "ruff", *check, "--no-cache", ".", cwd=project, home=tmp_path)
        assert done.code == 0, done.text


# ---- where the template comes from: all give the same project ----


@pytest.mark.slow  # cookiecutter unpacks it; without git: tests/template/test_scaffold.py
def test_from_a_zip_archive(default: Path, template: Path, tmp_path: Path):
    archive = tmp_path / "template.zip"
    git(template, "archive", "--format=zip", "--prefix=template-1/", "-o", str(archive), "HEAD")
    done = cookiecutter(archive, "--no-input", cwd=tmp_path, TMPDIR=str(tmp_path))
    assert tree(made(done, tmp_path / "my-nets")) == tree(default)


@pytest.mark.slow
def test_again_by_replay_and_over_an_older_project(default: Path, template: Path, tmp_path: Path):
    given = answers(project_name="Other Nets", license="Apache-2.0")
    first = tree(made(cookiecutter(template, *given, cwd=tmp_path), tmp_path / "other-nets"))
    (tmp_path / "other-nets/engine.txt").unlink()
    (tmp_path / "other-nets/tests/mine.py").write_text("mine")
    refused = cookiecutter(template, "--replay", cwd=tmp_path)
    assert refused.code == 1
    assert "already exists" in refused.text
    again = tree(made(cookiecutter(template, "--replay", "-f", cwd=tmp_path), tmp_path / "other-nets"))
    assert again.pop("tests/mine.py") == (b"mine", False)
    assert again == first
    assert "Apache License" in first["LICENSE"][0].decode()


@pytest.mark.slow
def test_files_of_all_kinds_come_unharmed(own_template: Path, tmp_path: Path):
    kinds = {
        "configs/windows.txt": b"one\r\ntwo {{ cookiecutter.project_name }}\r\n",
        "configs/image.png": bytes(range(256)) * 3,
        "configs/latin.txt": "Größe {{ 3".encode("latin-1"),
        "configs/jinja.txt": b"{% raw %}{{ cookiecutter.nothing }} ${{ matrix.x }} ${oc.env:HOME}",
        "configs/é è.yaml": b"a: 1\n",
        "configs/no_newline.txt": b"end",
    }
    for name, content in kinds.items():
        (own_template / name).write_bytes(content)
    program = own_template / "configs/program"
    program.write_bytes(b"#!/bin/sh\n")
    program.chmod(0o755)
    commit(own_template, "kinds")
    files = tree(made(cookiecutter(own_template, "--no-input", cwd=tmp_path), tmp_path / "my-nets"))
    assert {name: files[name] for name in kinds} == {name: (content, False) for name, content in kinds.items()}
    assert files["configs/program"] == (b"#!/bin/sh\n", True)


# ---- refusals ----


@pytest.mark.parametrize(
    ("given", "message"),
    few(
        [
            (
                {"package_name": "3d_nets"},
                "package_name='3d_nets': letters a-z, digits and '_', with a letter first",
            ),
            ({"project_name": "torch"}, "Take package_name=my_torch."),
            ({"project_name": "click"}, "Take project_slug=my-click."),
            ({"project_name": ""}, "project_name='': it must not be empty"),
            ({"package_name": "class"}, "package_name='class': it is a keyword of Python. Take package_name=my_class."),
            ({"description": "two\nlines"}, "it must be one line without control characters"),
        ],
        1,  # the others: test_hooks.py
    ),
)
def test_bad_answers_leave_nothing(given: dict[str, str], message: str, template: Path, tmp_path: Path):
    work = tmp_path / "work"
    work.mkdir()
    done = cookiecutter(template, *answers(**given), cwd=work)
    assert done.code == 1
    assert message in done.err
    assert "Traceback" not in done.err
    assert [path.name for path in work.iterdir() if path.name not in (".cookiecutters", ".cookiecutter_replay")] == []


# ---- in place ----


def make_new(clone: Path, *arguments: str, **more: str) -> Done:
    return run(
        "make", "--no-print-directory", "new", f"PYTHON={sys.executable}", *arguments, cwd=clone, home=clone, **more
    )


@pytest.fixture(scope="module")
def unchanged(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy for refusals, each of which must leave it as it was."""
    return Path(shutil.copytree(template, tmp_path_factory.mktemp("unchanged") / "template"))


def test_in_place_gives_the_same_project(default: Path, own_template: Path):
    (own_template / "src/wellfed/__pycache__").mkdir()
    (own_template / "src/wellfed/__pycache__/x.pyc").write_bytes(b"")
    done = make_new(own_template, "NAME=My Nets")
    assert done.code == 0, done.text
    assert tree(own_template) == tree(default)
    assert {path.name for path in (own_template / "src").iterdir()} == {
        path.name for path in (default / "src").iterdir()
    }
    assert not (own_template / "hooks").exists()
    assert "make train" in done.out


@pytest.mark.slow  # in place as above, awkward answers as baked
def test_in_place_with_awkward_answers_gives_the_same_project(awkward: Path, own_template: Path):
    given = [f"{key}={value}" for key, value in AWKWARD.items() if key != "project_name"]
    program = [sys.executable, "tools/scaffold.py", "new", AWKWARD["project_name"], *given]
    done = run(*program, cwd=own_template, home=own_template)
    assert done.code == 0, done.text
    assert tree(own_template) == tree(awkward)


@pytest.mark.parametrize(
    ("arguments", "message"),
    few(
        [
            (["NAME=x", "ARGS=package_name=3d_nets"], "refused: package_name='3d_nets'"),
            ([], 'Say how the project is called: make new NAME="My Nets"'),
            (
                ["NAME=Straße"],
                "letters that a folder name can't have: ß. Add a folder name: make new NAME=... ARGS=project_slug=",
            ),
            (["NAME=x", "ARGS=licence=MIT"], "licence is no question; there are project_name, project_slug,"),
            (["NAME=My Nets", "ARGS=gpu=1tb"], "gpu=1tb: it must be one of auto, cpu, 8gb"),
        ],
        1,  # the others: test_scaffold.py, test_hooks.py
    ),
)
def test_in_place_refusals_change_nothing(arguments: list[str], message: str, unchanged: Path):
    done = make_new(unchanged, *arguments, NAME="the machine's")  # WSL sets NAME
    assert done.code == 2
    assert message in done.err
    assert "Traceback" not in done.err
    assert git(unchanged, "status", "--porcelain") == ""


NEW = """
import runpy, sys
from tests.kit.meeting import meet
found = runpy.run_path("tools/scaffold.py")
shared = found["new"].__globals__
read = shared["read"]
shared["read"] = lambda template: (meet("clean"), read(template))[1]
sys.exit(found["main"](["new", "%s"]))
"""


def test_of_two_in_the_same_folder_one_makes_its_project_and_the_other_is_told(own_template: Path, tmp_path: Path):
    alone = Path(shutil.copytree(own_template, tmp_path / "alone"))
    done = together([NEW % "My Nets", NEW % "Your Nets"], tmp_path / "meeting", cwd=own_template)
    assert sorted(each.code for each in done) == [0, 1], done
    (lost,) = [each for each in done if each.code == 1]
    assert lost.err.startswith(f"{own_template} is being made a project by process ")
    assert lost.err.endswith(f" on {socket.gethostname()}. Wait for its end.\n")
    name = ("My Nets", "Your Nets")[done.index(lost) - 1]
    assert make_new(alone, f"NAME={name}").code == 0
    assert tree(own_template) == tree(alone)


def test_in_place_needs_a_clean_tree(own_template: Path):
    (own_template / "src/mine.py").write_text("x = 1\n")
    done = make_new(own_template, "NAME=My Nets")
    assert done.code == 2
    assert "1 files have changes that are not committed (src/mine.py)" in done.err
    shutil.rmtree(own_template / ".git")
    assert "no git repository" in make_new(own_template, "NAME=My Nets").err
    assert (own_template / "tools/scaffold.py").exists()
