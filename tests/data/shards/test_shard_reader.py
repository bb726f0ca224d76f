import errno
import multiprocessing
import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.data.shards.test_tar_members import packed
from wellfed.data.shards.shard_index import find_shards, index_shards
from wellfed.data.shards.shard_reader import ShardReader, read_into
from wellfed.errors import DataError


@pytest.fixture
def reader(tmp_path):
    for shard in range(4):
        clips = [(f"{shard}_{number}.wav", bytes([shard, number]) * 50) for number in range(25)]
        (tmp_path / f"{shard}.tar").write_bytes(packed(clips))
    return ShardReader(index_shards(find_shards(tmp_path), ["wav"], tmp_path / "cache"), "wav")


def expected(row):
    return bytes([row // 25, row % 25]) * 50


def test_threads_read_the_same(reader):
    orders = [np.random.default_rng(seed).permutation(100) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for order, found in zip(orders, pool.map(reader.read, orders), strict=True):
            assert [bytes(each) for each in found] == list(map(expected, order))


def _read(reader, rows, out):
    out.put([bytes(each) for each in reader.read(rows)])


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_other_processes_read_the_same(reader, method):
    reader.read(np.arange(100))  # opens all files here
    context = multiprocessing.get_context(method)
    out = context.Queue()
    process = context.Process(target=_read, args=(reader, np.array([99, 3]), out))
    process.start()
    assert out.get(timeout=60) == [expected(99), expected(3)]
    process.join()
    assert bytes(reader.read(np.array([7]))[0]) == expected(7)


def test_it_is_sent_without_its_files_and_lets_them_go(reader):
    reader.read(np.arange(100))
    copy = pickle.loads(pickle.dumps(reader))
    before = len(os.listdir("/proc/self/fd"))
    assert bytes(copy.read(np.array([50]))[0]) == expected(50)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    del copy
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_piece_of_each_is_read_into_a_table(reader):
    rows, table = np.array([30, 99, 0]), np.zeros((3, 7), np.uint8)
    reader.fill(rows, table, np.array([1, 2, 93]))
    assert [bytes(each) for each in table] == [expected(30)[1:8], expected(99)[2:9], expected(0)[93:]]


def test_a_shard_that_changes_or_goes_is_told(reader):
    paths = reader.index.paths
    reader.read(np.array([3]))
    paths[0].write_bytes(b"")
    with pytest.raises(DataError, match=r"0\.tar is shorter than it was when it was indexed, at '0_3'"):
        reader.read(np.array([3]))
    paths[2].write_bytes(paths[3].read_bytes())
    with pytest.raises(DataError, match=r"2\.tar has changed since it was indexed\. Start again"):
        reader.read(np.array([60]))
    paths[1].unlink()
    with pytest.raises(DataError, match=r"1\.tar can't be read: No such file"):
        reader.read(np.array([30]))


def test_samples_in_memory_are_copied_from_a_mapping(reader, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "wellfed.data.shards.shard_reader.read_into", lambda *given: calls.append(1) or read_into(*given)
    )
    monkeypatch.setattr("wellfed.data.shards.shard_reader._S_OF_A_BYTE", 1.0)
    for _ in range(2):
        assert [bytes(each) for each in reader.read(np.array([3, 60]))] == [expected(3), expected(60)]
    assert len(calls) == 2
    assert [bytes(each) for each in reader.read(np.array([60, 61]))] == [expected(60), expected(61)]
    assert len(calls) == 3  # 61 had not been read
    monkeypatch.setattr("wellfed.data.shards.shard_reader._S_OF_A_BYTE", 0.0)  # as slow as a disk: no longer in memory
    reader.read(np.array([3]))
    assert bytes(reader.read(np.array([3]))[0]) == expected(3)
    assert len(calls) == 4


def test_a_shard_that_is_cut_under_its_mapping_is_told(reader, monkeypatch):
    monkeypatch.setattr("wellfed.data.shards.shard_reader._S_OF_A_BYTE", 1.0)
    for _ in range(2):
        reader.read(np.array([3, 20]))
    assert reader._maps[0] is not None
    os.truncate(reader.index.paths[0], 1000)  # a read beyond the end of a mapping kills a process
    with pytest.raises(DataError, match=r"0\.tar is shorter than it was when it was indexed, at '0_3'"):
        reader.read(np.array([3]))


def test_too_many_open_files_have_a_way_out(reader, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("wellfed.data.shards.shard_reader.os.open", refuse)
    with pytest.raises(DataError, match=r"Too many open files\. Make fewer and larger shards.*ulimit"):
        reader.read(np.array([3]))


@pytest.mark.slow
def test_a_member_beyond_2_gib_is_read_whole(tmp_path):
    """Where one call of the system ends. The file takes no room, being empty but for its end."""
    path, size = tmp_path / "large", 2**31 + 8192
    with path.open("wb") as file:
        file.truncate(size)
        file.seek(size - 1)
        file.write(b"x")
    into = np.ones(size, np.uint8)
    with path.open("rb") as file:
        assert read_into(file.fileno(), into, 0) == size
        assert read_into(file.fileno(), into[:10], size - 4) == 4
    assert (into[-1], into[2**31]) == (ord("x"), 0)
