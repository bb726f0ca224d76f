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


def test_the_same_version_may_be_another_wheel(project: Path):
    """Also where it lies in vendor/ already."""
    file = project / "vendor" / engine.wheel_name("0.1.0")
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("wellfed/more.py", "")
    with pytest.raises(engine.EngineError, match="is not the file that engine.txt names"):
        engine.check(project)
    engine.change(project, str(file))
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
        ("{tmp}/gone", "there is no such file"),
        ("newest", "is no file, no folder and no version. Write make engine FROM=dist/wellfed-0.2.0-py3-none-any.whl"),
        ("{tmp}/text.whl", "is no wheel, or a damaged one (File is not a zip file). Copy or build it again."),
        ("{tmp}/cut.whl", "is no wheel, or a damaged one"),
        ("{tmp}/flipped.whl", "is damaged at wellfed/__init__.py"),
        ("{tmp}/numpy.whl", "is a wheel of numpy, not of wellfed. Name a wheel of wellfed"),
        ("{tmp}/zip.whl", "is no wheel, or a damaged one (it has no METADATA). Copy or build it again."),
        ("{tmp}/odd.whl", "has no version that could be pinned: 'a b'"),
        ("{tmp}/empty", "holds no engine (No such file or directory: pyproject.toml)"),
        ("{tmp}/other", "holds no engine (its pyproject.toml is of numpy)"),
    ],
)
def test_what_will_not_do_changes_nothing(source: str, message: str, project: Path, tmp_path: Path):
    content = wheel(tmp_path / "good.whl").read_bytes()
    (tmp_path / "text.whl").write_text("no wheel")
    (tmp_path / "cut.whl").write_bytes(content[: len(content) // 2])
    (tmp_path / "flipped.whl").write_bytes(content.replace(b"x = 1", b"x = 2", 1))
    wheel(tmp_path / "numpy.whl", name="numpy")
    wheel(tmp_path / "odd.whl", version="a b")
    with zipfile.ZipFile(tmp_path / "zip.whl", "w") as archive:
        archive.writestr("a", "b")
    (tmp_path / "empty").mkdir()
    checkout(tmp_path / "other", "numpy")
    before = state(project)
    with pytest.raises(engine.EngineError) as raised:
        engine.change(project, source.format(tmp=tmp_path))
    assert message in str(raised.value)
    assert state(project) == before


def test_a_project_that_does_not_name_the_engine_is_told(project: Path, tmp_path: Path):
    (project / "pyproject.toml").write_text('[project]\ndependencies = ["torch"]\n')
    for act in (lambda: engine.check(project), lambda: engine.change(project, "0.2.0")):
        with pytest.raises(engine.EngineError, match=r'no wellfed in its dependencies. Write it there once: "wellfed'):
            act()


def test_what_does_not_fit_is_told(project: Path):
    file, pin, pyproject = (
        project / each for each in ("vendor/wellfed-0.1.0-py3-none-any.whl", "engine.txt", "pyproject.toml")
    )
    good, texts = file.read_bytes(), {each: each.read_text() for each in (pin, pyproject)}

    def message() -> str:
        with pytest.raises(engine.EngineError) as raised:
            engine.check(project)
        file.write_bytes(good)
        for each, text in texts.items():
            each.write_text(text)
        engine.check(project)
        return str(raised.value)

    file.unlink()
    assert message() == (
        "vendor/wellfed-0.1.0-py3-none-any.whl is missing; engine.txt names it. "
        "git checkout -- vendor engine.txt pyproject.toml, or make engine FROM=<wheel>"
    )
    file.rename(file.with_name("wellfed-0.2.0-py3-none-any.whl"))
    assert message().endswith("or make engine FROM=vendor/wellfed-0.2.0-py3-none-any.whl")
    file.write_bytes(good + b"x")
    assert "It is damaged or was replaced. git checkout -- vendor engine.txt pyproject.toml, or, if" in message()
    pyproject.write_text(PYPROJECT.replace("==0.1.0", "==0.2.0"))
    assert message() == (
        "engine.txt has wellfed==0.1.0, and pyproject.toml has wellfed[hf,plots]==0.2.0. "
        "make engine FROM=vendor/wellfed-0.1.0-py3-none-any.whl makes both the same."
    )
    pin.write_text("wellfed\n")
    assert "engine.txt does not name one wellfed: 'wellfed'. git checkout" in message()
    pin.unlink()
    assert "engine.txt can't be read: No such file or directory. git checkout" in message()
    pyproject.write_text("[project")
    assert "pyproject.toml has no dependencies that can be read" in message()


def test_the_command(project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(engine, "__file__", str(project / "tools/engine.py"))
    assert engine.main(["check"]) == 0
    assert engine.main(["change", "0.2.0"]) == 0
    assert capsys.readouterr().out == "The engine is now version 0.2.0 of the package index.\n"
    for nothing in (["change"], ["change", ""], []):
        assert engine.main(nothing) == 2
        assert capsys.readouterr().err == "Which engine? make engine FROM=<wheel, folder or version>\n"
