import io
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wellfed.errors import DataError
from wellfed.shards.tar_members import BLOCK, Damage, Member, members, unsafe


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
    found = list(members(path))
    read = [
        (each.name, bytes(content[each.offset : each.offset + each.size])) for each in found if type(each) is Member
    ]
    return read, [(each.offset, each.problem) for each in found if type(each) is Damage]


FILES = [("a/1.wav", b"first"), ("a/1.cls", b"3"), ("b/2.wav", b"x" * 5000), ("b/2.cls", b"")]
FORMATS = pytest.mark.parametrize("tar_format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])


@FORMATS
def test_all_files_are_listed_with_their_places(tmp_path, tar_format):
    assert walked(tmp_path, packed(FILES, tar_format)) == (FILES, [])


@pytest.mark.parametrize("tar_format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_long_and_foreign_names_are_whole(tmp_path, tar_format):
    files = [("d/" * 80 + "é" * 60 + ".wav", b"1"), ("short.wav", b"2"), ("日本.wav", b"3")]
    assert walked(tmp_path, packed(files, tar_format)) == (files, [])


@given(st.lists(st.tuples(st.text("ab/é_", min_size=1, max_size=300), st.binary(max_size=1500)), max_size=6))
def test_what_tarfile_writes_is_found(tmp_path_factory, files):
    files = [(f"x{name.replace('//', '/').strip('/')}.wav", content) for name, content in files]
    assert walked(tmp_path_factory.mktemp("tar"), packed(files)) == (files, [])


def test_a_damaged_header_is_told_and_the_next_members_are_found(tmp_path):
    content = packed(FILES, tarfile.GNU_FORMAT)
    at = content.index(b"a/1.cls")
    content[at] ^= 0xFF
    read, damages = walked(tmp_path, content)
    assert read == [FILES[0], *FILES[2:]]
    assert damages == [(at, "its header is damaged")]
    with tarfile.open(tmp_path / "a.tar") as ended_silently:
        assert ended_silently.getnames() == ["a/1.wav"]


@FORMATS
@given(cut=st.floats(0.01, 0.99))
def test_a_file_that_is_cut_off_says_so_and_gives_what_is_whole(tmp_path_factory, tar_format, cut):
    content = packed([(f"{number}.wav", bytes([number]) * 700) for number in range(8)], tar_format)
    content = content[: max(BLOCK + 1, int(cut * (content.rindex(b"7.wav") + BLOCK + 700)))]
    read, damages = walked(tmp_path_factory.mktemp("tar"), content)
    assert read == [(f"{number}.wav", bytes([number]) * 700) for number in range(len(read))]
    assert damages
    assert "cut off" in damages[-1][1]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("../x.wav", "leads out"),
        ("a/../../x.wav", "leads out"),
        ("a\\..\\x.wav", "leads out"),
        ("/etc/x.wav", "absolute"),
        ("C:/x.wav", "absolute"),
    ],
)
def test_names_that_lead_elsewhere_are_damage(tmp_path, name, problem):
    read, damages = walked(tmp_path, packed([("a.wav", b"1"), (name, b"2"), ("b.wav", b"3")], tarfile.GNU_FORMAT))
    assert read == [("a.wav", b"1"), ("b.wav", b"3")]
    assert len(damages) == 1
    assert problem in damages[0][1]
    assert problem in unsafe(name)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (tarfile.SYMTYPE, "a link"),
        (tarfile.LNKTYPE, "a link"),
        (tarfile.FIFOTYPE, "a pipe"),
        (tarfile.CHRTYPE, "device"),
    ],
)
def test_what_is_no_file_is_damage(tmp_path, kind, said):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        member = tarfile.TarInfo("x.wav")
        member.type, member.linkname = kind, "/etc/passwd"
        tar.addfile(member)
        last = tarfile.TarInfo("y.wav")
        last.size = 1
        tar.addfile(last, io.BytesIO(b"1"))
    read, damages = walked(tmp_path, out.getvalue())
    assert read == [("y.wav", b"1")]
    assert said in damages[0][1]


def test_folders_are_passed_over(tmp_path):
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "x.wav").write_bytes(b"1")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(tmp_path / "f", "f")
    assert [each.name for each in members(tmp_path / "a.tar")] == ["f/x.wav"]


def test_two_archives_one_after_the_other_are_both_read(tmp_path):
    assert walked(tmp_path, packed(FILES) + packed([("c.wav", b"9")])) == ([*FILES, ("c.wav", b"9")], [])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"\x1f\x8b" + bytes(600), "compressed"),
        (b"hello" * 300, "no tar file"),
        (bytes(range(1, 200)), "no tar file"),
    ],
)
def test_other_files_are_refused(tmp_path, content, said):
    with pytest.raises(DataError, match=said):
        walked(tmp_path, content)


def test_an_archive_of_nothing_has_no_members(tmp_path):
    assert walked(tmp_path, packed([])) == ([], [])
