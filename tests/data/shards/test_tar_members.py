import io
import os
import tarfile
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wellfed.data.shards.tar_members import BLOCK, Damage, Member, members, unsafe
from wellfed.errors import DataError


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


def header(name, size, kind=b"0"):
    """A header whose checksum is right, whatever its size says."""
    block = bytearray(tarfile.TarInfo(name).tobuf(tarfile.USTAR_FORMAT))
    block[124:136], block[148:156], block[156:157] = size.ljust(12, b"\0"), b" " * 8, kind
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


@pytest.mark.parametrize("tar_format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_a_long_name_is_not_taken_for_the_member_after_a_damaged_one(tmp_path, tar_format):
    long = "d/" * 100
    files = [(f"{long}1.wav", b"1"), ("2.wav", b"2"), ("2.cls", b"3")]
    content = packed(files, tar_format)
    content[content.index(b"1" + bytes(BLOCK - 1)) - BLOCK] ^= 0xFF
    read, damages = walked(tmp_path, content)
    assert read == files[1:]
    assert [problem for _, problem in damages] == ["its header is damaged"]


@pytest.mark.parametrize("name", ["1.wav", "2.wav"])
def test_a_header_of_zeros_does_not_hide_a_member(tmp_path, name):
    files = [("0.wav", b"a" * 600), ("1.wav", b"b" * 600), ("2.wav", b"c" * 600)]
    content = packed(files, tarfile.GNU_FORMAT)
    at = content.index(name.encode())
    content[at : at + BLOCK] = bytes(BLOCK)
    read, damages = walked(tmp_path, content)
    assert read == [each for each in files if each[0] != name]
    assert damages == [(at + BLOCK, "its header is damaged")]


def test_a_negative_size_does_not_lead_back(tmp_path):
    read, damages = walked(tmp_path, header("a.wav", b"-1130") + bytes(packed([("b.wav", b"2")])))
    assert read == [("b.wav", b"2")]
    assert damages == [(0, "its size is no number")]


def test_a_name_that_is_too_long_to_be_one_hides_nothing(tmp_path):
    read, damages = walked(tmp_path, header("a", b"%011o" % 2**24, b"L") + bytes(packed([("b.wav", b"2")])))
    assert read == [("b.wav", b"2")]
    assert len(damages) == 1


EXTENDED = [
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
]


@pytest.mark.parametrize("kind", EXTENDED)
@pytest.mark.parametrize("before", [b"", header("a", b"%011o" % 1, b"L") + b"x".ljust(BLOCK, b"\0")])
@pytest.mark.parametrize("size", [b"%011o" % 2**32, b"%011o" % (2**20 + 1), b"-1130"])
def test_a_header_that_claims_gib_is_not_read_into_memory(tmp_path, kind, before, size):
    path = tmp_path / "a.tar"
    path.write_bytes(before + header("a", size, kind) + bytes(packed([("b.wav", b"2")])))
    os.truncate(path, 2**24)
    tracemalloc.start()  # tarfile would read all 16 MiB
    first, *others = members(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert first == Damage(0, "its header is damaged")
    assert [each.name for each in others if type(each) is Member] == ["b.wav"]
    assert peak < 2**23


@pytest.mark.parametrize("kind", [tarfile.DIRTYPE, tarfile.CHRTYPE, tarfile.SYMTYPE])
def test_what_has_no_bytes_hides_nothing_whatever_its_size_says(tmp_path, kind):
    read, _ = walked(tmp_path, header("x", b"%011o" % 4096, kind) + bytes(packed([("b.wav", b"2")])))
    assert read == [("b.wav", b"2")]


def test_a_sparse_file_in_pax_records_is_damage(tmp_path):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo("GNUSparseFile.1/x.wav")
        member.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.name": "x.wav"}
        tar.addfile(member)
        tar.addfile(tarfile.TarInfo("y.wav"))
    read, damages = walked(tmp_path, out.getvalue())
    assert read == [("y.wav", b"")]
    assert "a sparse file" in damages[0][1]


def test_an_old_tar_file_without_a_magic_word_is_read(tmp_path):
    content = packed([("a.wav", b"1")], tarfile.USTAR_FORMAT)
    content[257:265], content[148:156] = bytes(8), b" " * 8
    content[148:156] = b"%06o\0 " % sum(content[:BLOCK])
    assert walked(tmp_path, content) == ([("a.wav", b"1")], [])


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
