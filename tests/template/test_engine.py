"""A project's choice of its engine: tools/engine.py of a thin project."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from tests.template.commands import load

engine = load("{{cookiecutter.project_slug}}/tools/engine.py")
PYPROJECT = """[project]
name = "nets"
dependencies = [
  "wellfed[hf,plots]==0.1.0",
  "einops",
]
[project.optional-dependencies]
dev = ["wellfed[testing]"]
[tool.x]
y = ["wellfed"]
"""


def wheel(path: Path, version: str = "0.1.0", name: str = "wellfed") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}/__init__.py", "x = 1\n" * 100)
        archive.writestr(f"{name}-{version}.dist-info/METADATA", f"Name: {name}\nVersion: {version}\n\nName: text\n")
    return path


def checkout(folder: Path, name: str = "wellfed") -> Path:
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(f'[project]\nname = "{name}"\nversion = "0.3.0"\n')
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "mein Projekt ü"
    content = wheel(root / "vendor" / engine.wheel_name("0.1.0")).read_bytes()
    (root / "pyproject.toml").write_text(PYPROJECT)
    (root / "engine.txt").write_text(engine.pin_of_wheel(content, "0.1.0"))
    engine.check(root)
    return root


def state(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_another_wheel_takes_the_place_of_the_first(project: Path, tmp_path: Path):
    new = wheel(tmp_path / "neu ü" / "renamed.whl", "0.2.0")
    assert engine.change(project, str(new)) == "vendor/wellfed-0.2.0-py3-none-any.whl"
    files = state(project)
    assert files.pop("vendor/wellfed-0.2.0-py3-none-any.whl") == new.read_bytes()
    assert files.keys() == {"engine.txt", "pyproject.toml"}
    digest = hashlib.sha256(new.read_bytes()).hexdigest()
    assert files["engine.txt"].decode().splitlines()[1:] == [
        "--no-index",
        "--find-links vendor",
        f"wellfed==0.2.0 --hash=sha256:{digest}",
    ]
    assert files["pyproject.toml"].decode() == PYPROJECT.replace("plots]==0.1.0", "plots]==0.2.0")
    engine.check(project)


@pytest.mark.parametrize("name", ["wellfed", "well fed ü"])
def test_a_checkout_is_installed_as_it_is(name: str, project: Path, tmp_path: Path):
    folder = checkout(tmp_path / name)
    assert engine.change(project, str(folder)).endswith(f"{name}, version 0.3.0")
    line = (project / "engine.txt").read_text().splitlines()[-1]
    assert line == (f'-e "{folder}"' if " " in name else f"-e {folder}")
    assert '"wellfed[hf,plots]",' in (project / "pyproject.toml").read_text()
    assert not list((project / "vendor").iterdir())
    engine.check(project)
    (folder / "pyproject.toml").unlink()
    with pytest.raises(engine.EngineError, match=rf"{name} holds no engine \(No such file.*make engine FROM=<folder>"):
        engine.check(project)


def test_a_version_of_the_index(project: Path):
    assert engine.change(project, "0.2.0rc1") == "version 0.2.0rc1 of the package index"
    assert (project / "engine.txt").read_text().splitlines()[1:] == ["wellfed==0.2.0rc1"]
    assert not list((project / "vendor").iterdir())
    engine.check(project)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("gone.whl", "there is no such file. Name a wheel, a folder or a version."),
        ("newest", "is no file, no folder and no version. Write make engine FROM=dist/wellfed-0.2.0-py3-none-any.whl"),
        ("{tmp}/cut.whl", "is no wheel, or a damaged one"),
        ("{tmp}/numpy.whl", "is a wheel of numpy, not of wellfed. Name a wheel of wellfed"),
        ("{tmp}/other", "holds no engine (its pyproject.toml is of numpy)"),
    ],
)
def test_what_will_not_do_changes_nothing(source: str, message: str, project: Path, tmp_path: Path):
    content = wheel(tmp_path / "good.whl").read_bytes()
    (tmp_path / "cut.whl").write_bytes(content[: len(content) // 2])
    wheel(tmp_path / "numpy.whl", name="numpy")
    checkout(tmp_path / "other", "numpy")
    before = state(project)
    with pytest.raises(engine.EngineError) as raised:
        engine.change(project, source.format(tmp=tmp_path))
    assert message in str(raised.value)
    assert state(project) == before


def test_what_does_not_fit_is_told(project: Path):
    file = project / "vendor/wellfed-0.1.0-py3-none-any.whl"
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(engine.EngineError, match="is not the file that engine.txt names"):
        engine.check(project)
    file.unlink()
    with pytest.raises(engine.EngineError, match="is missing; engine.txt names it.*make engine FROM="):
        engine.check(project)
    (project / "pyproject.toml").write_text(PYPROJECT.replace("==0.1.0", "==0.2.0"))
    with pytest.raises(engine.EngineError, match=r"make engine FROM=\S+ makes both the same"):
        engine.check(project)


def test_the_command(project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(engine, "__file__", str(project / "tools/engine.py"))
    assert engine.main(["check"]) == 0
    assert engine.main(["change", "0.2.0"]) == 0
    assert capsys.readouterr().out == "The engine is now version 0.2.0 of the package index.\n"
    for nothing in (["change"], ["change", ""], []):
        assert engine.main(nothing) == 2
        assert capsys.readouterr().err == "Which engine? make engine FROM=<wheel, folder or version>\n"
