"""The site knows its repository by itself, and answers what users looked for on the first page of a search."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("site_of_docs", ROOT / "tools" / "site.py")  # Python has another site
assert SPEC is not None
assert SPEC.loader is not None
site = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(site)


@pytest.mark.parametrize(
    ("origin", "address"),
    [
        ("https://github.com/me/nets.git", "https://github.com/me/nets"),
        ("git@github.com:me/nets.git", "https://github.com/me/nets"),
        ("ssh://git@code.example.org/group/sub/nets", "https://code.example.org/group/sub/nets"),
        ("https://user:secret@code.example.org/me/nets/", "https://code.example.org/me/nets"),
        ("/home/me/nets", None),
        ("../nets", None),
        (None, None),
    ],
)
def test_the_address_is_that_of_the_checkout(origin: str | None, address: str | None, tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    if origin is not None:
        subprocess.run(["git", "-C", tmp_path, "remote", "add", "origin", origin], check=True)
    assert site.repository({}, tmp_path) == address
    workflow = {"GITHUB_SERVER_URL": "https://git.example.org", "GITHUB_REPOSITORY": "a/b"}
    assert site.repository(workflow, tmp_path) == "https://git.example.org/a/b"


def test_no_address_of_a_repository_has_to_be_filled_in() -> None:
    assert "repo_url" not in yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    for name in ("README.md", "mkdocs.yml", "pyproject.toml", "{{cookiecutter.project_slug}}/README.md"):
        assert "github.com/OWNER" not in (ROOT / name).read_text(), name
