import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from wellfed import __version__, project
from wellfed.errors import ConfigError
from wellfed.record import engine_state, engine_version

ASK = "from wellfed import project; print(project.root())"


def made(folder: Path) -> Path:
    for name, text in {"configs/train.yaml": "", "src/train.py": ASK, "src/mine/model.py": "x = 1\n"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def told(*command: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != project.VARIABLE}
    environment |= {"PYTHONPATH": str(project.ENGINE.parent), **environ}
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def test_the_script_that_was_started_tells_then_the_variable_then_the_working_directory(tmp_path: Path) -> None:
    one, two = made(tmp_path / "mit Leerzeichen é"), made(tmp_path / "two")
    (two / "deep" / "er").mkdir(parents=True)
    assert told(str(one / "src" / "train.py"), cwd=two, WELLFED_PROJECT=str(two)).stdout.strip() == str(one)
    assert told("-c", ASK, cwd=one, WELLFED_PROJECT=str(two)).stdout.strip() == str(two)
    assert told("-c", ASK, cwd=two / "deep" / "er").stdout.strip() == str(two)


def test_a_script_of_the_environment_belongs_to_no_project(tmp_path: Path) -> None:
    """Its folder lies in the project that has the environment: another may be meant."""
    other = made(tmp_path / "other")
    assert told("-m", "pytest", "--version", cwd=other).returncode == 0
    script = "import runpy, sys; sys.modules['__main__'].__file__ = sys.argv[1]; " + ASK
    inside = Path(pytest.__file__)
    assert told("-c", script, str(inside), cwd=other).stdout.strip() == str(other)


def test_the_nearest_of_two_around_the_working_directory(tmp_path: Path) -> None:
    inner = made(made(tmp_path / "outer") / "projects" / "inner")
    assert told("-c", ASK, cwd=inner / "src").stdout.strip() == str(inner)


def test_a_variable_that_names_another_project_than_the_working_directory_is_told(tmp_path: Path) -> None:
    one, two = made(tmp_path / "one"), made(tmp_path / "two ü")
    said = (
        f"WELLFED_PROJECT names the project: {one}, not {two}, the one that you stand in. Unset it to use that one.\n"
    )
    asked = ("-m", "wellfed", "add")
    assert told(*asked, cwd=two / "src", WELLFED_PROJECT=str(one)).stderr.startswith(said)
    for cwd, named in ((one, str(one)), (tmp_path, str(one)), (two, ""), (two, str(tmp_path))):
        assert "names the project" not in told(*asked, cwd=cwd, WELLFED_PROJECT=named).stderr
    ask = "from wellfed import project; print(project.two_named())"
    (two / "src/train.py").write_text(ask)
    assert told(str(two / "src/train.py"), cwd=two, WELLFED_PROJECT=str(one)).stdout == "None\n"


def test_no_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(project.VARIABLE)
    with pytest.raises(ConfigError, match="nor a folder around it has configs/train.yaml.*WELLFED_PROJECT=<folder>"):
        project.root()
    monkeypatch.setenv(project.VARIABLE, str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match="WELLFED_PROJECT=.*gone: has no configs/train.yaml"):
        project.root()


def test_the_digest_is_that_of_the_projects_code_and_the_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, same = made(tmp_path / "mine"), made(tmp_path / "same")
    monkeypatch.setenv(project.VARIABLE, str(mine))
    before = project.source_digest()
    (mine / "src" / "mine" / "model.pyc").write_bytes(b"1")
    (mine / "notebook.py").write_text("y = 1\n")
    assert project.source_digest() == before
    (mine / "src" / "mine" / "model.py").write_text("x = 2\n")
    assert project.source_digest() != before
    monkeypatch.setenv(project.VARIABLE, str(same))
    assert project.source_digest() == before


def test_an_engine_beside_the_project_tells_its_version_and_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(project.VARIABLE, str(made(tmp_path / "mine")))
    beside = engine_state()
    assert not beside["within_project"]
    assert beside["commit"] is None or len(beside["commit"]) == 40
    assert engine_version(beside).startswith("wellfed ")


@pytest.mark.parametrize(
    ("dependencies", "pinned"),
    [
        (["torch", "wellfed==0.3.1"], "0.3.1"),
        (["wellfed[plots,hf] == 1.0rc1 ; python_version > '3'"], "1.0rc1"),
        (["wellfed>=0.1"], None),
        (["wellfed-extras==0.1"], None),
    ],
)
def test_the_engine_that_a_project_pins(tmp_path: Path, monkeypatch, dependencies: list[str], pinned) -> None:
    (made(tmp_path) / "pyproject.toml").write_text(f"[project]\ndependencies = {json.dumps(dependencies)}\n")
    monkeypatch.setenv(project.VARIABLE, str(tmp_path))
    assert project.pinned_engine() == pinned


def test_another_engine_than_the_pinned_one_is_named_with_both_versions(tmp_path: Path, monkeypatch) -> None:
    pyproject = made(tmp_path) / "pyproject.toml"
    monkeypatch.setenv(project.VARIABLE, str(tmp_path))
    pyproject.write_text(f"[project]\ndependencies = ['wellfed=={__version__}']\n")
    assert project.engine_doubt() is None
    pyproject.write_text("[project]\ndependencies = ['wellfed==99.1']\n")
    assert f"pins wellfed 99.1, and this process runs wellfed {__version__} of" in str(project.engine_doubt())
    pyproject.write_text("this is not toml")
    assert project.engine_doubt() is None


def test_two_engines_in_one_environment_are_named(tmp_path: Path) -> None:
    """One on PYTHONPATH comes before the one that is installed."""
    site, env = tmp_path / "site", tmp_path / "env"
    (site / "wellfed-0.0.9.dist-info").mkdir(parents=True)
    (site / "wellfed-0.0.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: wellfed\nVersion: 0.0.9\n")
    made(env)
    ask = f"import sys; sys.path.insert(0, {str(site)!r}); from wellfed import project; print(project.engine_doubt())"
    said = told("-c", ask, cwd=env).stdout
    assert said.startswith(
        f"two engines: this process runs wellfed {__version__} of {project.ENGINE}, and wellfed 0.0.9 "
    )
    assert str(site) in said


def test_a_knob_of_another_version_in_a_file_is_named_with_the_engine(tmp_path: Path) -> None:
    """The configurations are the project's, the engine comes from elsewhere."""
    shutil.copytree(project.configs(), tmp_path / "configs")
    (tmp_path / "src").mkdir()
    (tmp_path / "configs" / "loader" / "auto.yaml").write_text("queue_depth: 3\n")
    (tmp_path / "pyproject.toml").write_text("[project]\ndependencies = ['wellfed==99.1']\n")
    refused = told("-m", "wellfed", "plan", "workload=null", cwd=tmp_path)
    assert refused.returncode == 2
    assert "configs/loader/auto.yaml:1: loader.queue_depth=3: no such knob. loader has backend" in refused.stderr
    assert "engine: pyproject.toml pins wellfed 99.1" in refused.stderr


def test_an_engine_installed_within_another_repository_has_none_of_its_commits(tmp_path: Path) -> None:
    """As in an environment that another one sees, which lies in a checkout."""
    site = tmp_path / "other" / ".venv" / "lib" / "site-packages"
    shutil.copytree(project.ENGINE, site / "wellfed", ignore=shutil.ignore_patterns("__pycache__"))
    for words in (["init", "-q"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "1", "--allow-empty"]):
        subprocess.run(["git", *words], cwd=tmp_path / "other", check=True)
    ask = "from wellfed.record import engine_state; print(engine_state()['commit'])"
    assert told("-c", ask, cwd=made(tmp_path / "mine"), PYTHONPATH=str(site)).stdout.strip() == "None"


def test_the_engine_of_a_record_of_an_earlier_version_is_unknown() -> None:
    assert engine_version(None) == "wellfed of an unknown version"


def test_nothing_else_looks_for_files_by_its_own_place() -> None:
    """Beside the files of a package that lie next to their reader."""
    may = {"project.py", "errors.py", "__main__.py"}
    asking = [
        f"{path.relative_to(project.ENGINE)}: {line.strip()}"
        for path in project.ENGINE.rglob("*.py")
        if path.name not in may
        for line in path.read_text(encoding="utf-8").splitlines()
        if "__file__" in line and ("parents[" in line or ".parent.parent" in line)
    ]
    assert asking == [], textwrap.dedent("wellfed.project tells where the project is")
