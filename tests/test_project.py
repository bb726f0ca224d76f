import os
import subprocess
import sys
from pathlib import Path

import pytest

from wellfed import project
from wellfed.errors import ConfigError
from wellfed.record.provenance import engine_state, engine_version

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
