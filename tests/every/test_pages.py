"""The pages that show a user's own files are followed to the letter, in a copy of the project."""

import json
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
