import hashlib
import zipfile
from pathlib import Path

import pytest

from wellfed import DataError
from workloads.recsys.download import download

FILES = {
    "ml-100k/u.data": "1\t1\t5\t1\n",
    "ml-100k/u.user": "1|1|M|x|1\n",
    "ml-100k/u.item": "1|x\n",
    "ml-100k/README": "r",
}


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "archive.zip"
    with zipfile.ZipFile(path, "w") as opened:
        for name, content in FILES.items():
            opened.writestr(name, content)
    return path


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


def test_an_archive_is_checked_and_unpacked(archive: Path, tmp_path: Path):
    target = download("ml-100k", tmp_path / "data", url=archive.as_uri(), md5=md5(archive))
    assert target == tmp_path / "data" / "ml-100k"
    assert {path.name: path.read_text() for path in target.iterdir()} == {
        name.removeprefix("ml-100k/"): text for name, text in FILES.items() if not name.endswith("README")
    }
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["ml-100k"]


def test_a_wrong_checksum_leaves_nothing(archive: Path, tmp_path: Path):
    with pytest.raises(DataError, match=f"MD5 is {md5(archive)}, expected 0e33842e24a9c977be4e0107933c0723"):
        download("ml-100k", tmp_path / "data", url=archive.as_uri())
    assert list((tmp_path / "data").iterdir()) == []


def test_an_archive_without_the_files_is_refused(archive: Path, tmp_path: Path):
    with pytest.raises(DataError, match=r"lacks ratings\.dat, users\.dat, movies\.dat"):
        download("ml-1m", tmp_path / "data", url=archive.as_uri(), md5=md5(archive))
    archive.write_bytes(b"no zip")
    with pytest.raises(DataError, match="no readable zip"):
        download("ml-1m", tmp_path / "data", url=archive.as_uri(), md5=md5(archive))
