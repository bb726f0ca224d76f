"""tools/scaffold.py as functions: what goes into a project, under which name, with which edits."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import sys
import sysconfig
import tomllib
from collections import OrderedDict
from pathlib import Path

import pytest
from cookiecutter.prompt import prompt_for_config
from slugify import slugify

from tests.template.commands import ROOT, commit, git, load

scaffold = load("tools/scaffold.py")
File = scaffold.File
ANSWERS = {
    "project_name": "My Nets",
    "project_slug": "my-nets",
    "package_name": "my_nets",
    "description": "d",
    "author": "me",
    "license": "MIT",
    "gpu": "auto",
    "workload": "blank",
    "keep_examples": False,
    "wandb_mode": "auto",
    "wandb_entity": "",
}


@pytest.fixture(scope="module")
def source(template: Path) -> dict[str, object]:
    return scaffold.read(template)


def test_it_needs_python_alone():
    tree = ast.parse((ROOT / "tools/scaffold.py").read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    assert {name.partition(".")[0] for name in imported} <= sys.stdlib_module_names


def test_no_file_is_a_link(template: Path):
    """Zip archives and Windows turn links into texts."""
    assert {line.split()[0] for line in git(template, "ls-files", "-s").splitlines()} <= {"100644", "100755"}


def test_files_are_those_that_git_tracks_and_that_are_there(tmp_path: Path):
    git(tmp_path, "init", "-q")
    for name in ("a.txt", "ü ö.txt", "gone.txt"):
        (tmp_path / name).write_text(name)
    commit(tmp_path, "first")
    (tmp_path / "gone.txt").unlink()
    (tmp_path / "untracked.txt").write_text("")
    assert scaffold.paths(tmp_path) == ["a.txt", "ü ö.txt"]


def test_without_git_what_gitignore_names_is_left_out(tmp_path: Path):
    for name in (".venv/x", "src/x.egg-info/y", "src/__pycache__/x.pyc", "src/a.py", "logs/run", ".gitignore"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("# rubbish\n\n.venv/\n*.egg-info/\n__pycache__/\n/logs/\n")
    assert scaffold.paths(tmp_path) == [".gitignore", "src/a.py"]


def test_a_repository_without_files_is_told(tmp_path: Path):
    git(tmp_path, "init", "-q")
    with pytest.raises(scaffold.ScaffoldError, match="has no files that git tracks"):
        scaffold.read(tmp_path)


def test_every_file_of_the_template_is_of_an_example_or_not(source: dict[str, object]):
    owned = [path for path in source if scaffold.of_example(path, "recsys")]
    assert {
        "src/workloads/recsys/model.py",
        "configs/workload/recsys.yaml",
        "configs/experiment/recsys_8gb.yaml",
    } <= set(owned)
    assert {path for path in source if "recsys" in path} - set(owned) <= {
        "tests/planning/golden/all_recsys.txt",
        "tests/planning/golden/all_recsys_gpt2.txt",
        "tests/planning/golden/guide_recsys_memory.txt",
    }
    assert not scaffold.of_example("configs/experiment/recsystem.yaml", "recsys")
    assert not scaffold.of_example("src/workloads/recsys2/model.py", "recsys")


def test_all_of_the_template_only_list_is_there(source: dict[str, object]):
    """A name on the list that nothing has is a leftover."""
    for beginning in scaffold.TEMPLATE_ONLY:
        assert any(path.startswith(beginning) for path in source), beginning
    assert {path for path in scaffold.CARRIED if path not in source} <= {".github/dependabot.yml"}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("from workloads.recsys.text import words", "from nets.text import words"),
        ("python -m workloads.recsys.download", "python -m nets.download"),
        ("src/workloads/recsys/model.py", "src/nets/model.py"),
        ("workload=recsys gpu=8gb", "workload=nets gpu=8gb"),
        ("recsys_8gb and my-recsys and recsystem", "recsys_8gb and my-recsys and recsystem"),
        ("0.25 ms a batch (`benchmarks/recsys_fetch.py`).", "0.25 ms a batch."),
        ("one\n\n**Learning.** measured\n\n| a |\n", "one\n"),
    ],
)
def test_renaming(old: str, new: str):
    assert scaffold.renamed(old + "\n", "recsys", "nets").rstrip("\n") == new.rstrip("\n")


def test_imports_are_sorted_and_wrapped_as_the_formatter_has_them():
    x, y, package = "x" * 40, "y" * 40, "n" * 30
    text = (
        "import numpy\n\nfrom wellfed.units import counted\nfrom workloads.recsys.data import (\n    a,\n    b,\n)\n"
        f"from workloads.recsys.text import {x}, {y}\n\nif True:\n    from workloads.recsys.model import M\n"
    )
    assert scaffold.renamed(text, "recsys", package) == (
        f"import numpy\n\nfrom {package}.data import (\n    a,\n    b,\n)\nfrom {package}.text import (\n    {x},\n"
        f"    {y},\n)\nfrom wellfed.units import counted\n\nif True:\n    from {package}.model import M\n"
    )
    assert scaffold.renamed(text, "recsys", "z").startswith(
        "import numpy\n\nfrom wellfed.units import counted\nfrom z.data "
    )


def test_an_import_in_brackets_may_be_the_last_of_its_block():
    text = "from workloads.recsys.a import (\n    A,\n    B,\n)\n\nX = 1\n"
    assert scaffold.renamed(text, "recsys", "nets") == text.replace("workloads.recsys", "nets")


def test_a_picture_beside_the_model_is_copied_as_it_is(source: dict[str, object]):
    picture = File(b"\x89PNG\r\n recsys \xff")
    files = scaffold.project_files({**source, "src/workloads/recsys/a.png": picture}, ANSWERS | {"workload": "recsys"})
    assert files["src/my_nets/a.png"] == picture


def test_what_is_put_in_is_not_edited_again():
    edit = scaffold.replacing(("a", "b"), ("b", "a"))
    assert edit("a-b") == "b-a"
    with pytest.raises(scaffold.ScaffoldError, match=r"'a' is there 2 times; tools/scaffold.py expects it once"):
        edit("a a b")


def test_a_description_may_look_like_the_file_that_it_goes_into(source: dict[str, object]):
    text = 'license = "MIT" name = "wellfed" packages = ["wellfed", "workloads"]'
    files = scaffold.project_files(source, ANSWERS | {"description": text})
    assert f"description = {json.dumps(text)}\n" in files["pyproject.toml"].content.decode()


def test_files_of_windows_keep_their_line_ends(source: dict[str, object]):
    windows = {
        path: File(file.content.replace(b"\n", b"\r\n"), file.executable) if b"\0" not in file.content else file
        for path, file in source.items()
    }
    unix = scaffold.project_files(source, ANSWERS)
    made = scaffold.project_files(windows, ANSWERS)
    for path in ("pyproject.toml", "Makefile", "configs/train.yaml", "docs/architecture.md"):
        assert made[path].content.replace(b"\r\n", b"\n") == unix[path].content
        assert made[path].content.count(b"\n") == made[path].content.count(b"\r\n")


def test_a_place_that_is_gone_is_told(source: dict[str, object]):
    for path, content, message in (
        (
            "configs/train.yaml",
            b"{}",
            r"configs/train.yaml: '- workload: recsys\\n' is there 0 times.*Tell the template's",
        ),
        ("pyproject.toml", b"", r"pyproject.toml: 'name = \"wellfed\"\\n' is there 0 times"),
    ):
        with pytest.raises(scaffold.ScaffoldError, match=message):
            scaffold.project_files({**source, path: File(content)}, ANSWERS)
    with pytest.raises(scaffold.ScaffoldError, match=r"The template has no Makefile"):
        scaffold.project_files({path: file for path, file in source.items() if path != "Makefile"}, ANSWERS)


@pytest.mark.parametrize("given", [{"license": "GPL"}, {"workload": "chess"}])
def test_unknown_choices_are_told(given: dict[str, str], source: dict[str, object]):
    with pytest.raises(scaffold.ScaffoldError, match=r"=(GPL|chess): it must be one of \w"):
        scaffold.project_files(source, ANSWERS | given)


@pytest.mark.parametrize("name", ["MIT", "Apache-2.0", "BSD-3-Clause", "Proprietary"])
def test_licenses(name: str, source: dict[str, object]):
    files = scaffold.project_files(source, ANSWERS | {"license": name, "author": r"A \1 <author>"})
    text = files["LICENSE"].content.decode()
    assert ("<author>" in text) == (
        name != "Apache-2.0"
    )  # Apache's text names nobody; elsewhere it is this author's name
    assert (r"Copyright (c) A \1 <author>" in text) == (name != "Apache-2.0")
    assert files["src/wellfed/LICENSE"] == source["LICENSE"]


def normal(name: str) -> str:
    """As package registries compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_pins_of_the_templates_tools_are_all_that_only_they_pull():
    """The list in the scaffold against what is installed: cookiecutter, cruft and what nothing else here asks for."""

    # Not those on sys.path: who imports setuptools puts what it carries along there.
    installed = importlib.metadata.distributions(path=[sysconfig.get_path("purelib")])
    requires = {normal(each.metadata["Name"]): each.requires or [] for each in installed}

    def pulled(*roots: str) -> set[str]:
        found, todo = set(), list(roots)
        while todo:
            name = normal(todo.pop())
            if name in requires and name not in found:
                found.add(name)
                todo += [re.split(r"[ \[<>=!~;(]", want)[0] for want in requires[name] if "extra" not in want]
        return found

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(entry for extra in project["optional-dependencies"].values() for entry in extra),
    ]
    names = {re.split(r"[\[<>=]", entry)[0] for entry in wanted}
    tools = {"cookiecutter", "cruft"}
    # python-dateutil and requests are matplotlib's and transformers' too.
    own = pulled(*tools) - pulled(*(names - tools))
    either = {"tzdata", "gitdb", "gitpython", "smmap"}  # an extra that is installed may ask for it too
    assert own - either == set(scaffold.TEMPLATE_TOOLS) - either
    pins = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    assert set(scaffold.TEMPLATE_TOOLS) <= pins


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("see [a](a.md) and [b](b.md#x).", "see [a](a.md) and b."),
        ("[code](../src/x.py) [folder](../src/) [web](https://x.y) [here](#part)",) * 2,
        ("as measured ([record](../benchmarks/r.json)); so", "as measured; so"),
        ("(`benchmarks/cost.py`, two cores)", "(two cores)"),
    ],
)
def test_links_to_what_stayed_behind_are_gone(text: str, left: str):
    assert scaffold._without_dead_links(text, "docs", ["docs/a.md", "src/x.py"]) == left


@pytest.mark.parametrize(
    "name", ["My Nets", "Réseau 4 GPU!", "3d nets", "  a  b ", "Anna's 1,000 nets", "A.B_c-d", "ﬁne Å", "!!!", "a/b\\c"]
)
def test_slugs_are_those_of_cookiecutter(name: str):
    assert scaffold.slug_of(name) == slugify(name)


@pytest.mark.parametrize("name", ["Straße", "网络", "Łódź"])
def test_letters_that_need_a_table_are_refused(name: str):
    with pytest.raises(scaffold.ScaffoldError, match="letters that a folder name can't have: [ß络Ł]"):
        scaffold.slug_of(name)


def test_answers_follow_from_the_name(template: Path):
    assert scaffold.answers_for(template, "My Nets", []) == ANSWERS | {
        "description": "Experiments with Hydra and Lightning.",
        "author": "The My Nets authors",
    }
    given = scaffold.answers_for(
        template, "网络", ["project_slug=Net.s", "keep_examples=yes", "gpu=8gb", "description=a=b"]
    )
    assert (given["package_name"], given["keep_examples"], given["gpu"]) == ("net_s", True, "8gb")
    assert given["description"] == "a=b"


@pytest.mark.parametrize(
    ("name", "slug", "package"),
    [
        (
            "Réseau 4 GPU! avec un nom assez long",
            "reseau-4-gpu-avec-un-nom-assez-long",
            "reseau_4_gpu_avec_un_nom_assez",
        ),
        ("3d nets", "3d-nets", "my_3d_nets"),
        ("n" * 300, "n" * 128, "n" * 30),
        ("a " * 100, "a-" * 63 + "a", "a_" * 14 + "a"),
    ],
)
@pytest.mark.parametrize("workload", ["blank", "recsys"])
def test_names_that_follow_from_the_projects_name_are_accepted(
    name: str, slug: str, package: str, workload: str, template: Path
):
    answers = scaffold.answers_for(template, name, [f"workload={workload}"])
    assert (answers["project_slug"], answers["package_name"]) == (slug, package)
    asked = json.loads((template / "cookiecutter.json").read_text())
    given = OrderedDict(project_name=name, project_slug=asked["project_slug"], package_name=asked["package_name"])
    assert prompt_for_config({"cookiecutter": given}, no_input=True) == {
        "project_name": name,
        "project_slug": slug,
        "package_name": package,
    }


def test_files_are_written_once(tmp_path: Path):
    files = {"a/b.sh": File(b"x", True), "c": File(b"\r\n\xff")}
    scaffold.write(files, tmp_path)
    before = (tmp_path / "c").stat().st_mtime_ns
    (tmp_path / "a/b.sh").chmod(0o600)
    scaffold.write(files, tmp_path)
    assert (tmp_path / "c").stat().st_mtime_ns == before
    assert (tmp_path / "a/b.sh").stat().st_mode & 0o111
    (tmp_path / "file").write_text("")
    with pytest.raises(scaffold.ScaffoldError, match=r"file/x can't be written: "):
        scaffold.write({"file/x": File(b"")}, tmp_path)
