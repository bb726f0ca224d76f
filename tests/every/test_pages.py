"""The pages that show a user's own files are followed to the letter, in a copy of the project."""

import json
import re
from pathlib import Path

import pytest

from tests.every.test_readme import ROOT, Block, blocks, project, run

__all__ = ["project"]
PAGES = ("docs/hugging_face.md", "docs/inference.md", "docs/lightning.md", "docs/migrate.md")


def blocks_of(page: str) -> list[Block]:
    return blocks((ROOT / page).read_text(encoding="utf-8"))


def write(block: Block, project: Path) -> None:
    """Writes a file of a page into the copy."""
    file = project / block.path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(block.text, encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_followed_to_the_letter(page: str, project: Path) -> None:
    runs = 0
    for block in blocks_of(page):
        if block.path:
            write(block, project)
            continue
        command = block.text
        if block.language == "python":
            (project / "typed.py").write_text(block.text, encoding="utf-8")
            command = "python typed.py"
        done = run(command, project)
        assert done.returncode == 0, f"{block.text}\n{done.stdout}\n{done.stderr}"
        runs += block.text.count("src/train.py")
    records = [json.loads(path.read_text()) for path in project.glob("logs/**/run.json")]
    assert [record["status"] for record in records] == ["ok"] * runs
    assert all({"val/loss", "test/loss"} < set(record["metrics"]) for record in records)


@pytest.mark.parametrize("page", PAGES)
def test_blocks_are_whole(page: str, tmp_path: Path) -> None:
    """Python that compiles, and yaml of the name that the commands know."""
    found = blocks_of(page)
    assert (ROOT / page).read_text(encoding="utf-8").count("\n```") == 2 * len(found)
    assert {block.language for block in found} <= {"python", "yaml", "bash"}
    for block in found:
        if block.language == "python":
            compile(block.text, block.path or page, "exec")
        elif block.language == "yaml":
            file = tmp_path / Path(block.path).relative_to("configs")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text, encoding="utf-8")
            (name,) = re.findall(r"^name: (\w+)$", block.text, flags=re.MULTILINE)
            assert file.stem == name
