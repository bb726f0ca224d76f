import io
import tarfile

import pytest

from wellfed.data.shards.shard_index import tar_members as members
from wellfed.errors import DataError

FILES = [("a/1.wav", b"x" * 700), ("a/1.cls", b"3"), (f"{'d/' * 100}2.wav", b""), ("é_2.cls", b"4" * 512)]
FORMATS = pytest.mark.parametrize("tar_format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])


def packed(files, tar_format=tarfile.PAX_FORMAT):
    """A tar file of names and contents."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tar_format) as tar:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return bytearray(out.getvalue())


def walked(tmp_path, content):
    path = tmp_path / "a.tar"
    path.write_bytes(content)
    return [(each.name, bytes(content[each.offset_data : each.offset_data + each.size])) for each in members(path)]


@FORMATS
def test_all_files_are_found_by_their_offsets(tmp_path, tar_format):
    assert walked(tmp_path, packed(FILES, tar_format)) == FILES


@pytest.mark.parametrize("link", [None, "symlink_to", "hardlink_to"])
def test_folders_are_passed_over_and_links_are_refused(tmp_path, link):
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "x.wav").write_bytes(b"1")
    if link is not None:
        getattr(tmp_path / "f" / "y.wav", link)(tmp_path / "f" / "x.wav")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(tmp_path / "f", "f")
    if link is None:
        assert [each.name for each in members(tmp_path / "a.tar")] == ["f/x.wav"]
        return
    with pytest.raises(DataError, match=r"a\.tar.*link"):
        list(members(tmp_path / "a.tar"))


def _flipped(content):
    content[content.index(b"a/1.cls")] ^= 0xFF
    return content


WHOLE = packed(FILES, tarfile.GNU_FORMAT)


@pytest.mark.parametrize(
    "content",
    [
        _flipped(bytearray(WHOLE)),
        WHOLE[: WHOLE.index(b"a/1.cls")],
        WHOLE[: WHOLE.index(b"a/1.cls") + 100],
        WHOLE[: WHOLE.index(b"a/1.cls") - 300],
        WHOLE + WHOLE,
        b"",
        b"\x1f\x8b" + bytes(600),
        b"hello" * 300,
    ],
    ids=["a header", "cut after", "cut in a header", "cut in a member", "two archives", "empty", "gzip", "text"],
)
def test_a_damaged_shard_is_refused_by_its_name(tmp_path, content):
    with pytest.raises(DataError, match=r"a\.tar"):
        walked(tmp_path, content)


def test_an_archive_of_nothing_has_no_members(tmp_path):
    assert walked(tmp_path, packed([])) == []
