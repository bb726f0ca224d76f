"""Installs a thin project by its Makefile: with wheels alone, and with the packages of hashes.txt alone."""

import hashlib
import io
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.template.commands import ROOT, Done, load, run

engine = load("{{cookiecutter.project_slug}}/tools/engine.py")
PYPROJECT = """[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "nets"
version = "0.1.0"
dependencies = ["wellfed==0.1.0"]
[project.optional-dependencies]
dev = ["thing"]
"""
BACKEND = '''"""Builds an editable wheel without setuptools, which the test has no copy of."""
import tomllib, zipfile
def build_editable(folder, config_settings=None, metadata_directory=None):
    project = tomllib.load(open("pyproject.toml", "rb"))["project"]
    needs = project["dependencies"] + [f"{one} ; extra == 'dev'" for one in project["optional-dependencies"]["dev"]]
    lines = ["Metadata-Version: 2.1", "Name: nets", "Version: 0.1.0", "Provides-Extra: dev"]
    lines += [f"Requires-Dist: {one}" for one in needs]
    of_wheel = ["Wheel-Version: 1.0", "Root-Is-Purelib: true", "Tag: py3-none-any", ""]
    with zipfile.ZipFile(f"{folder}/nets-0.1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("nets-0.1.0.dist-info/METADATA", "\\n".join(lines))
        archive.writestr("nets-0.1.0.dist-info/WHEEL", "\\n".join(of_wheel))
        archive.writestr("nets-0.1.0.dist-info/RECORD", "")
    return "nets-0.1.0-py3-none-any.whl"
'''


def wheel(folder: Path, name: str, version: str) -> bytes:
    """Writes a wheel that holds one module; returns its bytes."""
    stem = f"{name.replace('-', '_')}-{version}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name.replace('-', '_')}.py", "")
        archive.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{stem}.dist-info/RECORD", "")
    return path.read_bytes()


def source(folder: Path, name: str, ran: Path) -> None:
    """Writes a source package that leaves a file when its code runs."""
    texts = {
        "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        "setup.py": f"open({str(ran)!r}, 'w')\nimport setuptools\nsetuptools.setup(name={name!r}, version='1.0')\n",
    }
    with tarfile.open(folder / f"{name}-1.0.tar.gz", "w:gz") as archive:
        for file, text in texts.items():
            member = tarfile.TarInfo(f"{name}-1.0/{file}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))


@pytest.mark.slow
def test_an_installation_takes_wheels_and_what_has_a_hash(tmp_path: Path) -> None:
    root, house, ran = tmp_path / "nets", tmp_path / "house", tmp_path / "ran"
    files = [wheel(house, "antlr4-python3-runtime", "4.9.3"), wheel(house, "thing", "1.0")]
    wheel(house, "more", "1.0")
    source(house, "unbuilt", ran)
    content = wheel(root / "vendor", "wellfed", "0.1.0")
    (root / "tools").mkdir()
    for file in ("Makefile", "tools/engine.py"):
        shutil.copy(ROOT / "{{cookiecutter.project_slug}}" / file, root / file)
    (root / "engine.txt").write_text(engine.pin_of_wheel(content, "0.1.0"))
    (root / "pyproject.toml").write_text(PYPROJECT)
    (root / "backend.py").write_text(BACKEND)
    (root / "constraints.txt").write_text("antlr4-python3-runtime==4.9.3\n")
    variables = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(house), "PIP_CONFIG_FILE": "/dev/null"}

    def install(dev: str) -> Done:
        (root / "pyproject.toml").write_text(PYPROJECT.replace('"thing"', dev))
        return run("make", "install", f"PYTHON={sys.executable}", cwd=root, home=tmp_path, **variables)

    def installed() -> str:
        python = root / ".venv/bin/python"
        return run(python, "-m", "pip", "list", "--format=freeze", cwd=root, home=tmp_path).out

    done = install('"thing"')
    assert done.code == 0, done.text
    assert {"antlr4-python3-runtime==4.9.3", "thing==1.0", "wellfed==0.1.0"} <= {*installed().splitlines()}
    done = install('"thing", "unbuilt"')
    assert done.code != 0
    assert "No matching distribution found for unbuilt" in done.text
    assert not ran.exists()

    python = root / ".venv/bin/python"
    run(python, "-m", "pip", "uninstall", "-yq", "thing", "antlr4-python3-runtime", cwd=root, home=tmp_path)
    digests = [hashlib.sha256(file).hexdigest() for file in files]
    lines = [
        f"antlr4-python3-runtime==4.9.3 --hash=sha256:{digests[0]}",
        f"thing==1.0 --hash=sha256:{digests[1][::-1]}",
    ]
    (root / "hashes.txt").write_text("\n".join(lines))
    done = install('"thing"')
    assert done.code != 0
    assert "DO NOT MATCH THE HASHES" in done.text
    lines[1] = f"thing==1.0 --hash=sha256:{digests[1]}"
    (root / "hashes.txt").write_text("\n".join(lines))
    done = install('"thing"')
    assert done.code == 0, done.text
    assert "thing==1.0" in installed()
    done = install('"thing", "more"')
    assert done.code != 0
    assert "hashes.txt may lack a package: make hashes" in done.text
    assert "more==" not in installed()
