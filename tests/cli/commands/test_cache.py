"""``python -m wellfed cache``: what is listed, what is removed, and what is left alone."""

import json
from pathlib import Path

import pytest

from wellfed.cli import main as cli
from wellfed.data.prepared import prepared


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos.txt").write_text("of cats")
    home = tmp_path / ".cache"
    for kind, size in (("images", 3000), ("images", 500), ("clips", 10)):
        prepared(home, kind, [tmp_path / "photos.txt"], {"size": size}, lambda folder, size=size: fill(folder, size))
    return home


def fill(folder: Path, size: int) -> None:
    (folder / "a").write_bytes(bytes(size))


def shown(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert cli.main(["cache", *words]) == code
    told = capsys.readouterr()
    return told.err if code == 2 else told.out


def test_entries_by_kind_the_largest_first(cache: Path, capsys: pytest.CaptureFixture[str]):
    found = json.loads(shown(capsys, "list", "--json"))
    assert [entry["kind"] for entry in found] == ["clips", "images", "images"]
    assert [entry["bytes"] for entry in found] == [10, 3000, 500]
    assert {entry["name"] for entry in found} <= {path.name for path in cache.glob("*/*")}
    assert shown(capsys, "list", "clips").count("clips/") == 1


def test_clear_removes_a_kind_or_all(cache: Path, capsys: pytest.CaptureFixture[str]):
    shown(capsys, "clear", "clips")
    assert not [path for path in cache.glob("clips/*") if path.is_dir()]
    assert len([path for path in cache.glob("images/*") if path.is_dir()]) == 2
    assert "2 folders removed" in shown(capsys, "clear")
    assert json.loads(shown(capsys, "list", "--json")) == []


def test_other_folders_are_left_alone(cache: Path, capsys: pytest.CaptureFixture[str]):
    mine = cache / "images" / "0123456789abcdef"
    mine.mkdir()
    (mine / "thesis.txt").write_text("mine")
    being_made = next(cache.glob("images/*.lock")).with_suffix(".part")
    being_made.mkdir()
    shown(capsys, "clear")
    assert (mine / "thesis.txt").exists()
    assert being_made.exists()


def test_a_kind_that_is_not_there_is_told(cache: Path, capsys: pytest.CaptureFixture[str]):
    err = shown(capsys, "list", "imagez", code=2)
    assert "imagez" in err
    assert "clips, images" in err


def test_no_cache_is_an_empty_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert json.loads(shown(capsys, "list", "--cache-dir", str(tmp_path / "no"), "--json")) == []
