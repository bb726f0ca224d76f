"""``python -m wellfed cache``: what is listed, what is removed, and what is left alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import wellfed
from wellfed.cli import main as cli
from wellfed.cli.commands.cache import FOOTPRINT
from wellfed.data.prepared import digest, nobody_uses, prepared

SOURCE = {**os.environ, "PYTHONPATH": str(Path(wellfed.__file__).parents[1])}
MAKE = """
import sys
from pathlib import Path
from wellfed.data.prepared import prepared
cache, source, kind, size = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
print(prepared(cache, kind, [source, source], {"size": size}, lambda folder: (folder / "a").write_bytes(bytes(size))))
sys.stdout.flush()
if "stay" in sys.argv:
    sys.stdin.readline()
"""


def begin(*words: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", MAKE, *map(str, words)]
    return subprocess.Popen(command, env=SOURCE, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def made(*words: object) -> Path:
    """Prepares data in another process, which ends, and returns its folder."""
    return Path(begin(*words).communicate()[0].strip())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos.txt").write_text("of cats")
    home = tmp_path / ".cache"
    for number in range(12):
        folder = home / "footprints" / f"{number:016x}"
        folder.mkdir(parents=True)
        (folder / FOOTPRINT).write_text("x" * (100 + number))
    return home


def shown(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert cli.main(["cache", *words]) == code
    told = capsys.readouterr()
    return told.err if code == 2 else told.out


def test_what_it_calls_a_footprint_is_what_the_plan_writes():
    file = Path(wellfed.__file__).parent / "plan" / "predict" / "cache.py"  # importing it takes torch
    assert f'FILE_NAME = "{FOOTPRINT}"' in file.read_text()


def test_it_lists_kinds_and_entries(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = made(cache, tmp_path / "photos.txt", "images", 5000)
    manifest = (folder / "manifest.json").stat().st_size
    lines = shown(capsys, "list").splitlines()
    assert lines[0] == "footprints: 12 entries, 1.2 KiB"
    assert lines[1].split()[:3] == ["000000000000000b", "111", "B"]
    assert lines[1].endswith("  a model under a training")
    assert lines[11] == "  and 2 smaller ones: python -m wellfed cache list footprints"
    assert lines[12].startswith("images: 1 entry, ")
    assert lines[13].split()[0] == folder.name
    assert lines[13].endswith(f"{tmp_path / 'photos.txt'} and 1 more; size=5000")
    assert len(shown(capsys, "list", "footprints").splitlines()) == 13
    (entry,) = json.loads(shown(capsys, "list", "images", "--json"))
    assert (entry["kind"], entry["name"], entry["bytes"]) == ("images", folder.name, 5000 + manifest)
    assert 0 <= entry["age_s"] < 60


OTHER_TYPES = {"settings": (None, "abc", 3, [1], True), "num_sources": (None, "abc", [1], {}, True, 1.5, -1)}


def test_an_entry_whose_manifest_has_other_types_is_damaged_and_is_cleared(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = made(cache, tmp_path / "photos.txt", "images", 5000)
    manifest = json.loads((folder / "manifest.json").read_text())
    for name, values in OTHER_TYPES.items():
        for value in values:
            (folder / "manifest.json").write_text(json.dumps({**manifest, name: value}))
            assert shown(capsys, "list", "images").endswith("  damaged\n"), (name, value)
    assert shown(capsys, "clear", "images").startswith("removed from .cache: 1 entry, ")
    assert not folder.exists()


def test_an_old_one_is_so_many_days_old(cache: Path, capsys: pytest.CaptureFixture[str]):
    for path in (cache / "footprints" / f"{0:016x}" / FOOTPRINT, cache / "footprints" / f"{0:016x}"):
        os.utime(path, (0, 0))
    assert " days  a model" in shown(capsys, "list", "footprints")


def test_it_clears_a_kind_or_all(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    made(cache, tmp_path / "photos.txt", "images", 5000)
    made(cache, tmp_path / "photos.txt", "images", 6000)
    assert shown(capsys, "clear", "images").startswith("removed from .cache: 2 entries, 11.")
    assert [path.name for path in cache.iterdir()] == ["footprints"]
    assert shown(capsys, "clear") == "removed from .cache: 12 entries, 1.2 KiB\n"
    assert not [*cache.iterdir()]
    assert shown(capsys, "clear") == ".cache: nothing was removed.\n"
    assert shown(capsys, "list") == ".cache: nothing is kept there.\n"


def test_what_is_in_use_stays(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    made(cache, tmp_path / "photos.txt", "images", 5000)
    user = begin(cache, tmp_path / "photos.txt", "images", 6000, "stay")
    assert user.stdout is not None
    folder = Path(user.stdout.readline().strip())
    assert "size=6000 (in use)" in shown(capsys, "list", "images")
    told = shown(capsys, "clear", "images")
    assert told.startswith("removed from .cache: 1 entry, 5.")
    assert f"{Path('.cache', 'images', folder.name)} stays: it is in use" in told
    assert (folder / "a").exists()
    user.communicate()
    assert shown(capsys, "clear", "images").startswith("removed from .cache: 1 entry, 6.")
    assert not (cache / "images").exists()


def test_what_a_killed_or_failed_build_left_is_removed(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = made(cache, tmp_path / "photos.txt", "images", 5000)
    half = folder.rename(folder.with_name(f"{folder.name}.123-abcd"))
    assert " half built" in shown(capsys, "list", "images")
    with nobody_uses(folder):  # as one that builds it
        assert "stays: it is in use" in shown(capsys, "clear", "images")
        assert half.exists()
    shown(capsys, "clear", "images")
    assert not (cache / "images").exists()
    damaged = made(cache, tmp_path / "photos.txt", "images", 5000)
    (damaged / "manifest.json").unlink()
    assert " damaged" in shown(capsys, "list", "images")
    shown(capsys, "clear")
    with pytest.raises(ZeroDivisionError):
        prepared(cache, "images", [], {}, lambda folder: print(1 // 0))
    assert shown(capsys, "list") == ".cache: nothing is kept there.\n"  # a lock is nothing


def test_other_folders_are_left_alone(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    mine = tmp_path / "mine"
    (mine / "thesis" / f"{1:016x}").mkdir(parents=True)
    (mine / "thesis" / f"{1:016x}" / "chapter.tex").write_text("years")
    told = shown(capsys, "clear", "--cache-dir", "mine", code=2)
    assert "mine: is no cache of wellfed; it holds thesis. Name the folder of paths.cache_dir: --cache-dir DIR." in told
    (cache / "thesis").symlink_to(mine / "thesis")
    (cache / "footprints" / "notes.txt").write_text("mine")
    (cache / "footprints" / f"{99:016x}").symlink_to(mine / "thesis" / f"{1:016x}")
    shown(capsys, "clear")
    assert (mine / "thesis" / f"{1:016x}" / "chapter.tex").exists()
    assert (cache / "footprints" / "notes.txt").exists()


def test_what_is_typed_wrong_is_told(cache: Path, capsys: pytest.CaptureFixture[str]):
    for words, told in {
        ("list", "image"): "image: is no kind of what .cache holds. There are: footprints.",
        ("clear", "images", "--cache-dir", "gone"): "images: is no kind of what gone holds. Nothing is kept there.",
        ("list", "--cache-dir", "photos.txt"): "photos.txt: can't be read (Not a directory)",
    }.items():
        assert told in shown(capsys, *words, code=2)
    assert shown(capsys, "list", "--cache-dir", "gone") == "gone: nothing is kept there.\n"
    with pytest.raises(SystemExit) as ended:
        cli.main(["cache", "clean"])
    assert ended.value.code == 2


def test_what_cant_be_removed_is_told(cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("shutil.rmtree", refuse)
    told = shown(capsys, "clear", code=1)
    assert told.startswith(".cache: nothing was removed.\n")
    assert "stays: it can't be removed (Permission denied)" in told
    (found, *_) = json.loads(shown(capsys, "clear", "--json", code=1))["kept"]
    assert found["why"] == "can't be removed (Permission denied)"


def test_an_entry_is_found_by_the_digest_of_its_sources(cache: Path, tmp_path: Path):
    source = tmp_path / "photos.txt"
    assert made(cache, source, "images", 3).name == digest([source, source], {"size": 3})


def test_it_needs_no_torch(cache: Path):
    code = "import sys; from wellfed.cli import main; main.main(['cache', 'list']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=SOURCE, text=True, capture_output=True, check=True)
    assert done.stdout.endswith("False\n")
