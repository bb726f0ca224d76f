"""tools/scaffold.py as functions: what goes into a project, under which name, with which edits."""

import fnmatch
import json
import re
import tomllib
from collections import OrderedDict
from os.path import normpath
from pathlib import Path

import pytest
import yaml
from cookiecutter.prompt import prompt_for_config
from slugify import slugify

from tests.kit.few import few
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
    "wandb_mode": "auto",
    "wandb_entity": "",
}


@pytest.fixture(scope="module")
def source(template: Path) -> dict[str, object]:
    return scaffold.read(template)


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
        "tests/plan/golden/all_recsys.txt",
        "tests/plan/golden/all_recsys_gpt2.txt",
        "tests/plan/golden/guide_recsys_memory.txt",
    }
    assert not scaffold.of_example("configs/experiment/recsystem.yaml", "recsys")
    assert not scaffold.of_example("src/workloads/recsys2/model.py", "recsys")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("from workloads.recsys.text import words", "from nets.text import words"),
        ("python -m workloads.recsys.download", "python -m nets.download"),
        ("src/workloads/recsys/model.py", "src/nets/model.py"),
        ("workload=recsys gpu=8gb", "workload=nets gpu=8gb"),
        ("recsys_8gb and my-recsys and recsystem", "recsys_8gb and my-recsys and recsystem"),
        ("`recsys_8gb`, `recsys`", "`nets_8gb`, `nets`"),
        ("defaults:\n  - recsys_8gb", "defaults:\n  - nets_8gb"),
        ("0.25 ms a batch (`benchmarks/loader.py`).", "0.25 ms a batch."),
        ("one\n\n**Learning.** measured\n\n| a |\n", "one\n"),
    ],
)
def test_renaming(old: str, new: str):
    assert scaffold.renamed(old + "\n", "recsys", "nets").rstrip("\n") == new.rstrip("\n")


@pytest.mark.parametrize("workload", ["blank", "forecast", "hyperspectral", "recsys", "restoration", "speech"])
def test_code_and_tests_of_a_workload_import_nothing_that_stays_behind(workload: str, source: dict[str, object]):
    """A project has the engine and the package; of the template's tests it has those of the workload alone."""
    files = scaffold.starting_workload(source, {**ANSWERS, "workload": workload})
    texts = [file.content.decode() for path, file in files.items() if path.endswith(".py")]
    imported = {name for text in texts for name in re.findall(r"(?m)^ *(?:from|import) ([\w.]+)", text)}
    assert "my_nets.model" in imported
    assert {name for name in imported if re.match(r"(tests|workloads|benchmarks)\b(?!\.my_nets\b)", name)} == set()


@pytest.mark.parametrize("workload", ["blank", "forecast", "hyperspectral", "recsys", "restoration", "speech"])
def test_the_pages_of_a_project_name_what_it_has(workload: str, source: dict[str, object]):
    files = scaffold.project_files(source, ANSWERS | {"workload": workload})
    for path in (path for path in files if path.endswith("README.md")):
        text = files[path].content.decode()
        links = [link for link in re.findall(r"\]\(([^)#]+)", text) if not link.startswith("https://")]
        assert {normpath(f"{path}/../{link}") for link in links} <= files.keys()
        named = re.findall(rf"`(?:experiment=)?((?:{workload}|my_nets)_\w+)`", text)
        assert {f"configs/experiment/{name}.yaml" for name in named} <= files.keys()
        assert "benchmarks/" not in text


def test_a_picture_beside_the_model_is_copied_as_it_is(source: dict[str, object]):
    picture = File(b"\x89PNG\r\n recsys \xff")
    files = scaffold.project_files({**source, "src/workloads/recsys/a.png": picture}, ANSWERS | {"workload": "recsys"})
    assert files["src/my_nets/a.png"] == picture


@pytest.mark.parametrize("given", [{"license": "GPL"}, {"workload": "chess"}])
def test_unknown_choices_are_told(given: dict[str, str], source: dict[str, object]):
    with pytest.raises(scaffold.ScaffoldError, match=r"=(GPL|chess): it must be one of \w"):
        scaffold.project_files(source, ANSWERS | given)


@pytest.mark.parametrize("name", ["click", "Identify", "packaging", "charset_normalizer", "Jaraco.Context"])
def test_names_of_packages_that_come_along_are_refused(name: str, source: dict[str, object]):
    """pip would have to install the project and the package under one name."""
    pins = File(source["constraints.txt"].content + b"jaraco.context==6.0.1\n")
    plain = re.sub(r"[-_.]", "-", name.lower())
    expected = rf"project_slug='{name}': constraints.txt pins a package of this name.* Take project_slug=my-{plain}\."
    with pytest.raises(scaffold.ScaffoldError, match=expected):
        scaffold.project_files({**source, "constraints.txt": pins}, ANSWERS | {"project_slug": name})


def test_a_package_named_like_one_that_comes_along_is_refused(source: dict[str, object]):
    with pytest.raises(scaffold.ScaffoldError, match=r"package_name='click': .* Take package_name=my_click\."):
        scaffold.project_files(source, ANSWERS | {"package_name": "click"})


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
    given = scaffold.answers_for(template, "网络", ["project_slug=Net.s", "gpu=8gb", "description=a=b"])
    assert (given["package_name"], given["gpu"]) == ("net_s", "8gb")
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


def test_imports_are_wrapped_as_the_formatter_has_them():
    x, y, package = "x" * 40, "y" * 40, "n" * 30
    text = (
        "from workloads.recsys.data import (\n    a,\n    b,\n)\n"
        f"from workloads.recsys.text import {x}, {y}\n\nif True:\n    from workloads.recsys.model import M\n"
    )
    assert scaffold.renamed(text, "recsys", package) == (
        f"from {package}.data import (\n    a,\n    b,\n)\nfrom {package}.text import (\n    {x},\n    {y},\n)\n\n"
        f"if True:\n    from {package}.model import M\n"
    )


@pytest.mark.parametrize("name", ["MIT", "Apache-2.0", "BSD-3-Clause", "Proprietary"])
def test_licenses(name: str, source: dict[str, object]):
    files = scaffold.project_files(source, ANSWERS | {"license": name, "author": r"A \1 <author>"})
    text = files["LICENSE"].content.decode()
    assert (r"Copyright (c) A \1 <author>" in text) == (name != "Apache-2.0")  # Apache's text names nobody


def test_an_answer_may_look_like_the_file_that_it_goes_into(source: dict[str, object]):
    text = r"""license = "MIT" {{ cookiecutter.author }} \1 '''"""
    files = scaffold.project_files(source, ANSWERS | {"description": text, "wandb_entity": "us"})
    project = tomllib.loads(files["pyproject.toml"].content.decode())["project"]
    assert project["description"] == text
    assert files["README.md"].content.decode().startswith(f"# My Nets\n\n{text}\n")
    assert yaml.safe_load(files["configs/logger/wandb.yaml"].content)["entity"] == "us"


def test_configurations_are_the_templates_own(source: dict[str, object]):
    """Those with answers too: with the template's own choices they are its files."""
    files = scaffold.project_files(source, ANSWERS)
    choices = {"configs/train.yaml": ("my_nets", "recsys")}
    for path in sorted(path for path in files if path.startswith("configs/") and "my_nets" not in path):
        mine, theirs = (each[path].content.decode() for each in (files, source))
        if path == "configs/logger/wandb.yaml":
            assert mine == f'{theirs}project: "my-nets"\nentity: null\n'
        else:
            assert mine.replace(*choices.get(path, ("", ""))) == theirs, path
    groups = {path.split("/")[1] for path in files if path.count("/") == 2 and path.startswith("configs/")}
    assert groups == {path.split("/")[1] for path in source if path.startswith("configs/") and path.count("/") == 2} - {
        "experiment"
    }


def test_make_targets_are_the_templates_own(source: dict[str, object]):
    """Those that both have: a change of one is a change of the other."""

    def recipes(text: str) -> dict[str, str]:
        text = text.replace("$(ON)", "")
        return dict(re.findall(r"(?m)^([a-z-]+:.*)\n((?:\t.*\n)+)", text))

    theirs = recipes(source["Makefile"].content.decode())
    ours = recipes(source[scaffold.THIN + "Makefile"].content.decode())
    names = {line.partition(":")[0] for line in ours}
    assert names == {
        "help",
        "install",
        "train",
        "tune",
        "sweep",
        "test",
        "check",
        "format",
        "doctor",
        "engine",
        "clean",
        "hashes",
    } - {"install"}
    for name in ("train", "tune", "sweep", "format", "doctor"):
        ((line, recipe),) = ((line, ours[line]) for line in ours if line.startswith(f"{name}:"))
        assert theirs[line] == recipe
    checks = [
        re.search(r"(?s)define CHECK_PYTHON.*?endef", source[path].content.decode())
        for path in ("Makefile", scaffold.THIN + "Makefile")
    ]
    assert checks[0] is not None
    assert checks[1] is not None
    assert checks[0][0] == checks[1][0]


def test_the_workflow_uses_the_same_actions_as_the_templates(source: dict[str, object]):
    ours, theirs = (
        set(re.findall(r"uses: (.*)", source[path].content.decode()))
        for path in (f"{scaffold.THIN}.github/workflows/ci.yml", ".github/workflows/ci.yml")
    )
    assert len(ours) == 2
    assert ours <= theirs


def test_cookiecutter_copies_all_files_unrendered_and_no_folder_whole(source: dict[str, object]):
    """A folder that it copies whole is removed first: with what is the user's, when a project is made anew."""
    patterns = json.loads((ROOT / "cookiecutter.json").read_text())["_copy_without_render"]
    files = {path.removeprefix(scaffold.THIN) for path in source if path.startswith(scaffold.THIN)}
    folders = {parent.as_posix() for path in files for parent in Path(path).parents}
    assert [path for path in files if not any(fnmatch.fnmatch(path, each) for each in patterns)] == []
    assert [path for path in folders if any(fnmatch.fnmatch(path, each) for each in patterns)] == []
    assert all(any(fnmatch.fnmatch(path, each) for path in files) for each in patterns)


@pytest.mark.parametrize(
    ("workload", "extras"),
    few(
        [
            ("blank", ""),
            ("forecast", "tables"),
            ("hyperspectral", "mat"),
            ("recsys", "hf"),
            ("restoration", "images"),
            ("speech", "audio"),
        ],
        3,
    ),
)
def test_the_engine_comes_with_what_the_example_needs(workload: str, extras: str, source: dict[str, object]):
    files = scaffold.project_files(source, ANSWERS | {"workload": workload})
    project = tomllib.loads(files["pyproject.toml"].content.decode())["project"]
    version = tomllib.loads(source["pyproject.toml"].content.decode())["project"]["version"]
    (engine,) = project["dependencies"]
    named, brought = re.fullmatch(r"(wellfed(?:\[(.*)\])?)==(.*)", engine).group(1, 2)
    assert engine == f"{named}=={version}"
    assert {*filter(None, [extras])} <= set((brought or "").split(","))
    assert {*filter(None, [extras]), "testing"} <= tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ].keys()


def test_a_template_that_lacks_the_engine_is_told(source: dict[str, object]):
    for path in ("pyproject.toml", "README.md"):
        with pytest.raises(scaffold.ScaffoldError, match=f"The template has no '{path}': no engine can be made of it"):
            scaffold.project_files({each: file for each, file in source.items() if each != path}, ANSWERS)


def test_bytecode_of_a_clone_whose_tests_have_run_is_left_out(template: Path, tmp_path: Path):
    copy, project = tmp_path / "template", tmp_path / "project"
    git(tmp_path, "clone", "-q", str(template), str(copy))
    for root in (copy / scaffold.THIN, project):  # as cookiecutter copies it
        (root / "tools" / "__pycache__").mkdir(parents=True)
        (root / "tools" / "__pycache__" / "engine.pyc").write_bytes(b"")
    scaffold.fill(copy, project, ANSWERS)
    assert (project / "tools" / "engine.py").is_file()
    assert not (project / "tools" / "__pycache__").exists()
