"""tools/thin.py: a project with a copy of the engine becomes a thin one."""

import json
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

from tests.template.commands import ROOT, Done, commit, cookiecutter, git, run, tree

COPYING = "0f4aa790"
"""A commit of this repository whose template still copies the engine."""


@pytest.fixture(scope="module")
def made(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project as an earlier template has made it: the files of a copy, with the names in it."""
    cwd = tmp_path_factory.mktemp("earlier")
    root = cwd / "alte Netze ü"
    for path in ("src/wellfed", "src/hydra_plugins", "configs", "docs", "tests/every", "src/train.py", "src/tune.py"):
        copy = shutil.copytree if (template / path).is_dir() else shutil.copy
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        copy(template / path, root / path)
    for path in ("src/evaluate.py", "Makefile", "constraints.txt", ".gitignore", "LICENSE"):
        shutil.copy(template / path, root / path)
    shutil.copytree(template / "src/wellfed/cli/blank", root / "src/old_nets")
    (root / "src/old_nets/workload.yaml").rename(root / "configs/workload/old_nets.yaml")
    for path in [*root.glob("src/old_nets/*.py"), root / "configs/workload/old_nets.yaml"]:
        path.write_text(path.read_text().replace("wellfed.cli.blank", "old_nets").replace("blank", "old_nets"))
    train = root / "configs/train.yaml"
    train.write_text(
        train.read_text().replace("workload: recsys", "workload: old_nets").replace("gpu: auto", "gpu: 8gb")
    )
    (root / "docs/memory.md").write_text("# Edited when the project was made\n")
    (root / "src/wellfed/LICENSE").write_text((template / "LICENSE").read_text())
    (root / "README.md").write_text("# Old Nets\n\nAs made.\n")
    (root / "pyproject.toml").write_text(
        '[project]\nname = "old-nets"\nversion = "0.1.0"\ndescription = "Old."\nlicense = "LicenseRef-Proprietary"\n'
        'authors = [{ name = "me" }]\ndependencies = ["torch>=2.6", "Hydra_Core", "wandb"]\n'
    )
    git(root, "init", "-q")
    commit(root, "first")
    return root


@pytest.fixture
def project(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "alte Netze ü"))


def thin(template: Path, project: Path) -> Done:
    return run(sys.executable, "tools/thin.py", project, cwd=template, home=project.parent)


def test_what_is_unchanged_goes_and_own_files_stay(template: Path, project: Path):
    before = tree(project)
    done = thin(template, project)
    assert done.code == 0, done.text
    after = tree(project)
    gone = {path for path in before if path.startswith(("src/wellfed/", "src/hydra_plugins/", "docs/", "tests/every/"))}
    assert len(gone) > 400
    assert not gone & after.keys()
    assert not (project / "before_thin").exists()
    replaced = {"Makefile", "README.md", "constraints.txt", "pyproject.toml"} & {
        path for path in before if before[path] != after.get(path)
    }
    assert {path: after[path] for path in before.keys() - gone - replaced} == {
        path: before[path] for path in before.keys() - gone - replaced
    }
    assert run(sys.executable, "tools/engine.py", "check", cwd=project, home=project.parent).code == 0
    text = (project / "pyproject.toml").read_text()
    read = tomllib.loads(text)["project"]
    assert (read["name"], read["description"], read["license"]) == ("old-nets", "Old.", "LicenseRef-Proprietary")
    assert read["authors"] == [{"name": "me"}]
    assert read["dependencies"] == ["wellfed==0.1.0"]
    assert (project / "README.md").read_text().startswith("# Old Nets\n\nOld.\n")
    assert not (project / "configs/workload/recsys_x.yaml").exists()
    assert f"{len(gone)} files of the engine's copy removed" in done.out


def test_what_was_changed_is_kept_aside_and_listed(template: Path, project: Path):
    (project / "src/old_nets/data.py").write_text("import pandas\nimport einops\n")
    changed = {
        "src/wellfed/units.py": "# ours\n",
        "src/wellfed/ours.py": "# ours too\n",
        "docs/memory.md": "# ours\n",
        "tests/every/test_workloads.py": "# ours\n",
        "Makefile": "all:\n",
        "README.md": "# Old Nets\n\nOurs.\n",
        "pyproject.toml": (project / "pyproject.toml").read_text().replace('"wandb"', '"wandb", "einops>=0.8"'),
    }
    for path, text in changed.items():
        (project / path).write_text(text)
    own = {"docs/ours.md": "# Ours\n", "benchmarks/ours.py": "x = 1\n", "tests/conftest.py": "x = 1\n"}
    for path, text in own.items():
        (project / path).parent.mkdir(exist_ok=True)
        (project / path).write_text(text)
    commit(project, "ours")
    done = thin(template, project)
    assert done.code == 0, done.text
    aside = {path: content.decode() for path, (content, _) in tree(project / "before_thin").items()}
    assert aside == {path: text for path, text in changed.items() if path != "README.md"}
    assert all(f"\n  {path}\n" in done.out for path in aside)
    files = tree(project)
    assert {path: files[path][0].decode() for path in own} == own
    assert files["README.md"][0].decode() == changed["README.md"]
    dependencies = tomllib.loads((project / "pyproject.toml").read_text())["project"]["dependencies"]
    assert dependencies == ["wellfed[tables]==0.1.0", "einops>=0.8"]
    assert "Dependencies of yours that pyproject.toml still has: einops>=0.8" in done.out


@pytest.mark.parametrize("license", ['"GPL-3.0-or-later"', '{ text = "GPL-3.0-or-later" }'])
def test_another_licence_and_an_author_without_a_name_stay(template: Path, project: Path, license: str):
    path = project / "pyproject.toml"
    text = path.read_text().replace('"LicenseRef-Proprietary"', license).replace('name = "me"', 'email = "me@x.org"')
    path.write_text(text)
    (project / "LICENSE").write_text("The GPL.\n")
    commit(project, "ours")
    done = thin(template, project)
    assert done.code == 0, done.text
    found = tomllib.loads(path.read_text())["project"]
    assert (found["license"], found["authors"]) == ("GPL-3.0-or-later", [{"name": "me@x.org"}])
    assert (project / "LICENSE").read_text() == "The GPL.\n"


@pytest.mark.slow
def test_an_older_version_of_the_engine_is_unchanged_too(own_template: Path, project: Path):
    """The template's history knows it."""
    (own_template / "src/wellfed/units.py").write_text("# newer\n")
    git(own_template, "rm", "-q", "src/wellfed/masking.py")
    commit(own_template, "newer")
    git(project, "commit", "-q", "--amend", "-m", "first")
    done = thin(own_template, project)
    assert done.code == 0, done.text
    assert not (project / "before_thin").exists()
    assert not (project / "src/wellfed").exists()


@pytest.mark.slow
def test_a_template_without_history_knows_its_own_files_alone(own_template: Path, project: Path):
    shutil.rmtree(own_template / ".git")
    (own_template / "src/wellfed/units.py").write_text("# newer\n")
    git(project, "mv", "src/wellfed/units.py", "x")
    commit(project, "away")
    git(project, "mv", "x", "src/wellfed/units.py")
    (project / "src/wellfed/units.py").write_text("# ours\n")
    commit(project, "back")
    done = thin(own_template, project)
    assert done.code == 0, done.text
    assert list(tree(project / "before_thin")) == ["src/wellfed/units.py"]


def test_refusals_change_nothing(template: Path, project: Path, tmp_path: Path):
    def refused(folder: Path, message: str) -> None:
        before = tree(folder)
        done = thin(template, folder)
        assert done.code == 1
        assert message in done.err
        assert "Traceback" not in done.err
        assert tree(folder) == before

    refused(tmp_path / "gone", "gone has no configs/train.yaml: no project")
    made = (project / "pyproject.toml").read_text()
    (project / "pyproject.toml").write_text(made.replace('"LicenseRef-Proprietary"', '{ file = "LICENSE" }'))
    commit(project, "a licence by its file")
    refused(project, "pyproject.toml has license={'file': 'LICENSE'}: it must be an SPDX expression.")
    (project / "pyproject.toml").write_text(made)
    commit(project, "back")
    (project / "notes.txt").write_text("x")
    refused(project, "1 files have changes that are not committed (notes.txt). Commit or stash them first.")
    (project / "before_thin").mkdir()
    (project / "notes.txt").rename(project / "before_thin/notes.txt")
    commit(project, "aside")
    refused(project, "before_thin is there already. Move it away.")
    git(project, "rm", "-qr", "before_thin")
    (project / "configs/workload/old_nets.yaml").unlink()
    commit(project, "no workload")
    refused(project, "names no workload with a _target_")
    shutil.rmtree(project / "src/wellfed")
    refused(project, "has no src/wellfed: no copy of the engine: it is thin")
    shutil.copytree(template / "src/wellfed", project / "src/wellfed")
    shutil.rmtree(project / ".git")
    refused(project, "is no git repository, so nothing could be undone")


@pytest.mark.slow
def test_a_project_of_a_real_earlier_template(template: Path, tmp_path: Path):
    if not (ROOT / ".git").exists() or run("git", "cat-file", "-e", COPYING, cwd=ROOT, home=tmp_path).code != 0:
        pytest.skip(f"needs this repository's history, with commit {COPYING}: git fetch --unshallow")
    old = tmp_path / "template"
    git(tmp_path, "clone", "-q", "--no-checkout", str(ROOT), str(old))
    git(old, "checkout", "-q", COPYING)
    whole = tmp_path / "whole"  # files of the engine have moved since: only the history knows them all
    git(tmp_path, "clone", "-q", str(ROOT), str(whole))
    for arguments in (["keep_examples=yes", "workload=speech"], []):
        cwd = tmp_path / f"{len(arguments)}"
        cwd.mkdir()
        done = cookiecutter(old, "--no-input", *arguments, cwd=cwd)
        assert done.code == 0, done.text
        project = cwd / "my-nets"
        git(project, "init", "-q")
        commit(project, "first")
        done = thin(whole, project)
        assert done.code == 0, done.text
        assert not (project / "before_thin").exists()
        commit(project, "thin")
        done = run(sys.executable, "-m", "ruff", "check", "--fix", "-q", ".", cwd=project, home=tmp_path)
        assert done.code == 0, done.text
        more = {"PYTHONPATH": f"{project / 'src'}:{template / 'src'}", "WELLFED_PROJECT": ""}
        quick = ("gpu=cpu", "trainer.max_steps=2", "trainer.limit_batches=2", "logger=none", "telemetry=none")
        done = run(sys.executable, "src/train.py", *quick, cwd=project, home=tmp_path, timeout_s=300, **more)
        assert done.code == 0, done.text
        (record,) = project.glob("logs/*/runs/*/run.json")
        assert json.loads(record.read_text())["status"] == "ok"
