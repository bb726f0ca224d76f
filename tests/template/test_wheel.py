"""The engine's wheel: what tools/wheel.py writes is what setuptools builds, and installers take it."""

import ast
import importlib.metadata
import re
import shutil
import sys
import venv
import zipfile
from collections.abc import Callable
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest

from tests.kit.few import slow
from tests.template.commands import ROOT, git, run

WHEEL = "wellfed-{}-py3-none-any.whl"


def written(tree: Path, folder: Path) -> Path:
    done = run(sys.executable, "tools/wheel.py", folder, cwd=tree, home=folder.parent)
    assert done.code == 0, done.text
    (wheel,) = folder.glob("*.whl")
    assert done.out.strip() == str(wheel)
    return wheel


@pytest.fixture(scope="module")
def ours(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(template, tmp_path_factory.mktemp("ours") / "ein Ordner ü")


@pytest.fixture(scope="module")
def theirs(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("theirs")
    tree = Path(shutil.copytree(template, folder / "tree"))
    major = int(importlib.metadata.version("setuptools").split(".")[0])
    isolation = ["--no-build-isolation"] if major >= 77 else []
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", *isolation, "-w", folder, "."]
    done = run(*command, cwd=tree, home=folder)
    assert done.code == 0, done.text
    (wheel,) = folder.glob("*.whl")
    return wheel


def entries(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


def metadata(wheel: Path) -> Message:
    (text,) = (content for name, content in entries(wheel).items() if name.endswith("/METADATA"))
    return message_from_string(text.decode("utf-8"))


@pytest.mark.slow
def test_it_is_what_setuptools_builds(ours: Path, theirs: Path):
    assert ours.name == theirs.name
    mine, others = entries(ours), entries(theirs)
    assert mine.keys() == others.keys()
    differing = {name.rpartition("/")[2] for name in mine if mine[name] != others[name]}
    assert differing <= {"METADATA", "RECORD", "WHEEL"}
    one, other = metadata(ours), metadata(theirs)
    assert sorted(one.items()) == sorted(other.items())
    assert one.get_payload() == other.get_payload()


def test_neither_examples_nor_tests_nor_configurations_are_in_it(ours: Path):
    tops = {name.partition("/")[0] for name in entries(ours)}
    assert {top for top in tops if not top.endswith((".dist-info", ".data"))} == {"wellfed", "hydra_plugins"}
    examples = {path.name for path in (ROOT / "src/workloads").iterdir() if path.is_dir()}
    assert not [name for name in entries(ours) if examples & set(name.split("/"))]


@pytest.mark.slow
def test_the_same_files_give_the_same_bytes(ours: Path, template: Path, tmp_path: Path):
    """Without git, with other times and modes, and with rubbish beside."""
    tree = Path(shutil.copytree(template, tmp_path / "ü tree", copy_function=shutil.copy))
    shutil.rmtree(tree / ".git")
    (tree / "src/wellfed/__pycache__").mkdir(exist_ok=True)
    (tree / "src/wellfed/__pycache__/x.pyc").write_bytes(b"x")
    assert written(tree, tmp_path / "out").read_bytes() == ours.read_bytes()


@pytest.mark.slow
def test_a_file_that_git_does_not_track_is_not_in_it(ours: Path, own_template: Path, tmp_path: Path):
    (own_template / "src/wellfed/secret.py").write_text("x = 1\n")
    assert written(own_template, tmp_path / "out").read_bytes() == ours.read_bytes()
    git(own_template, "add", "-A")
    assert "wellfed/secret.py" in entries(written(own_template, tmp_path / "again"))


@pytest.mark.slow
def test_windows_line_ends_do_not_change_it(ours: Path, own_template: Path, tmp_path: Path):
    for path in own_template.glob("src/wellfed/*.py"):
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert written(own_template, tmp_path / "out").read_bytes() == ours.read_bytes()


def test_it_needs_python_alone():
    for name in (
        "tools/wheel.py",
        "tools/scaffold.py",
        "{{cookiecutter.project_slug}}/tools/engine.py",
    ):
        tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
        assert {each.partition(".")[0] for each in imported} <= sys.stdlib_module_names | {"scaffold"}, name


def test_no_folder_is_told():
    done = run(sys.executable, "tools/wheel.py", cwd=ROOT, home=ROOT)
    assert done.code == 1
    assert "one folder is expected. Write python tools/wheel.py dist" in done.err


@pytest.mark.parametrize("tool", [slow("pip"), "uv"])
def test_it_is_installed_and_as_recorded(tool: str, ours: Path, tmp_path: Path, require_tool: Callable[[str], Path]):
    place = tmp_path / "eine Umgebung"
    venv.create(place, with_pip=False)
    python = place / "bin/python"
    installer = [str(require_tool("uv")), "pip"] if tool == "uv" else [sys.executable, "-m", "pip", "--python", python]
    wanted = ["--python", python] if tool == "uv" else []
    done = run(*installer, "install", *wanted, "--no-deps", ours, cwd=tmp_path, home=tmp_path)
    assert done.code == 0, done.text
    code = "import wellfed, importlib.metadata as m; print(m.version('wellfed'), wellfed.__file__)"
    version, where = run(python, "-c", code, cwd=tmp_path, home=tmp_path).out.split(maxsplit=1)
    assert WHEEL.format(version) == ours.name
    site = Path(where).parents[1]
    assert site.is_relative_to(place)
    data = f"wellfed-{version}.data/data/"
    for name, content in entries(ours).items():
        if not name.endswith("RECORD"):
            file = place / name.removeprefix(data) if name.startswith(data) else site / name
            assert file.read_bytes() == content, name
    code = "from pathlib import Path; from wellfed.explain.report.finding_pages import page_of_finding as page; "
    said = run(python, "-c", f"{code}print(page('slow_copy', Path()))", cwd=place, home=tmp_path).out
    assert said.strip() == "share/wellfed/findings/slow_copy.md"


@pytest.mark.slow
def test_pipx_installs_the_command(own_template: Path, tmp_path: Path, require_tool: Callable[[str], Path]):
    """Of a wheel without dependencies, which would be gigabytes; `wellfed --version` needs none."""
    pyproject = own_template / "pyproject.toml"
    text, found = re.subn(r"(?ms)^dependencies = \[.*?^\]", "dependencies = []", pyproject.read_text(), count=1)
    assert found
    pyproject.write_text(text)
    wheel = written(own_template, tmp_path / "ein Ordner")
    places = {"PIPX_HOME": str(tmp_path / "pipx"), "PIPX_BIN_DIR": str(tmp_path / "bin")}
    done = run(require_tool("pipx"), "install", wheel, cwd=tmp_path, home=tmp_path, timeout_s=300, **places)
    assert done.code == 0, done.text
    said = run(tmp_path / "bin/wellfed", "--version", cwd=tmp_path, home=tmp_path, PYTHONPATH="").out
    assert WHEEL.format(said.split()[1]) == wheel.name
