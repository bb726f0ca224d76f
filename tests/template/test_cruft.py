"""The life of a project after its first day: cruft create, check, update and diff against a template that moves on."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.template.commands import Done, commit, git, run, tree

WHEEL = "wellfed-0.1.0-py3-none-any.whl"


@dataclass(frozen=True)
class Pair:
    """A template and a project that cruft made of its tag v1."""

    template: Path
    project: Path

    def cruft(self, *arguments: str) -> Done:
        return run(sys.executable, "-m", "cruft", *arguments, cwd=self.project, home=self.project.parent)

    def edit(self, *, template: bool, path: str, old: str, new: str) -> None:
        file = (self.template if template else self.project) / path
        text = file.read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{path}: {old}"
        file.write_text(text.replace(old, new), encoding="utf-8")


@pytest.fixture
def pair(own_template: Path, tmp_path: Path) -> Pair:
    made = run(
        sys.executable, "-m", "cruft", "create", f"file://{own_template}", "--checkout", "v1", "--no-input",
        "--extra-context", json.dumps({"project_name": "Örtliche Netze", "wandb_entity": "us"}),
        cwd=tmp_path, home=tmp_path,
    )  # fmt: skip
    assert made.code == 0, made.text
    project = tmp_path / "ortliche-netze"
    git(project, "init", "-q")
    git(project, "config", "user.name", "somebody")
    git(project, "config", "user.email", "somebody@example.org")
    commit(project, "first")
    return Pair(own_template, project)


@pytest.mark.slow
def test_update_brings_the_templates_changes_and_keeps_ours(pair: Pair):
    own = "src/ortliche_netze/model.py"
    pair.edit(template=False, path=own, old="hidden: int = 64", new="hidden: int = 32")
    (pair.project / "src/ortliche_netze/mine.py").write_text('"""A file of our own."""\n')
    pair.edit(template=False, path="README.md", old="## Start\n", new="## Start\n\nA line of ours.\n")
    commit(pair.project, "ours")
    assert "src/ortliche_netze/model.py" in pair.cruft("diff").out

    before = (pair.project / "vendor" / WHEEL).read_bytes()
    pair.edit(
        template=True, path="{{cookiecutter.project_slug}}/README.md", old="## License\n", new="## License\n\nNew.\n"
    )
    pair.edit(
        template=True,
        path="{{cookiecutter.project_slug}}/configs/logger/wandb.yaml",
        old="mode: {{",
        new="# New.\nmode: {{",
    )
    (pair.template / "configs/loader/newer.yaml").write_text("backend: auto\n")
    (pair.template / "configs/debug/limit.yaml").unlink()
    (pair.template / "src/wellfed/newer.py").write_text('"""New."""\n')
    commit(pair.template, "second")
    git(pair.template, "tag", "v2")
    assert pair.cruft("check").code == 1

    done = pair.cruft("update", "--skip-apply-ask", "--checkout", "v2")
    assert done.code == 0, done.text
    files = {path: content.decode(errors="replace") for path, (content, _) in tree(pair.project).items()}
    assert "hidden: int = 32" in files[own]
    assert files["src/ortliche_netze/mine.py"] == '"""A file of our own."""\n'
    assert "## Start\n\nA line of ours.\n" in files["README.md"]
    assert "## License\n\nNew.\n" in files["README.md"]
    assert 'name = "ortliche-netze"\n' in files["pyproject.toml"]
    assert files["configs/logger/wandb.yaml"] == '# New.\nmode: auto\nproject: "ortliche-netze"\nentity: "us"\n'
    assert "configs/loader/newer.yaml" in files
    assert "configs/debug/limit.yaml" not in files
    assert (pair.project / "vendor" / WHEEL).read_bytes() != before
    done = run(sys.executable, "tools/engine.py", "check", cwd=pair.project, home=pair.project.parent)
    assert done.code == 0, done.text
    assert not [path for path in files if path.endswith(".rej")]
    assert git(pair.project, "diff", "--name-only", "--diff-filter=U") == ""
    commit(pair.project, "updated")
    assert pair.cruft("check", "--checkout", "v2").code == 0
