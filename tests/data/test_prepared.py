"""Prepared data on disk, with real processes and a real full disk."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import wellfed
from wellfed.data.prepared import digest, prepared
from wellfed.errors import DataError

SOURCE = {**os.environ, "PYTHONPATH": str(Path(wellfed.__file__).parents[1])}
BUILDER = """
import sys
from pathlib import Path
from wellfed.data.prepared import prepared
cache, source, log = map(Path, sys.argv[1:4])
def build(folder):
    with log.open("a") as file:
        file.write("begun\\n")
    (folder / "half").write_bytes(b"x" * 1000)
    print("building", flush=True)
    sys.stdin.readline()
    (folder / "whole").write_bytes(source.read_bytes())
print(prepared(cache, "images", [source], {}, build), flush=True)
sys.stdin.readline()
"""


class Builder:
    """Writes what it is given, and counts."""

    def __init__(self, **members: bytes) -> None:
        self.members = members or {"pixels": b"abc"}
        self.calls = 0

    def __call__(self, folder: Path) -> None:
        self.calls += 1
        assert not [*folder.iterdir()]
        for name, content in self.members.items():
            (folder / name).write_bytes(content)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.csv"
    path.write_text("a,b\n1,2\n")
    return path


@pytest.fixture
def processes() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    begun: list[subprocess.Popen[str]] = []

    def begin(*words: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", BUILDER, *map(str, words)]
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        begun.append(subprocess.Popen(command, env=SOURCE, text=True, start_new_session=True, **pipes))
        return begun[-1]

    yield begin
    for process in begun:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


# -- once -----------------------------------------------------------------------------------------------------------


def test_it_is_built_once_and_found_again(tmp_path: Path, source: Path):
    build = Builder()
    first = prepared(tmp_path / "cache", "images", [source], {"size": 3}, build)
    assert first == tmp_path / "cache" / "images" / digest([source], {"size": 3})
    assert (first / "pixels").read_bytes() == b"abc"
    assert prepared(str(tmp_path / "cache"), "images", [source], {"size": 3}, build) == first
    assert build.calls == 1
    assert {path.name for path in first.parent.iterdir()} == {first.name, f"{first.name}.lock"}


def test_another_source_size_time_or_setting_is_another_entry(tmp_path: Path, source: Path):
    other = shutil.copy2(source, tmp_path / "other.csv")
    seen = [
        digest([source], {}),
        digest([Path(other)], {}),
        digest([source, Path(other)], {}),
        digest([source], {"a": 1}),
    ]
    os.utime(source, ns=(0, source.stat().st_mtime_ns + 1))
    seen.append(digest([source], {}))
    source.write_text("a,b\n1,2\n3,4\n")
    os.utime(source, ns=(0, 0))
    seen.append(digest([source], {}))
    assert len(set(seen)) == len(seen)
    assert digest([source], {"a": 1, "b": (2,)}) == digest([source], {"b": [2], "a": 1})


def test_two_processes_at_once_build_it_once(tmp_path: Path, source: Path, processes: Callable[..., Any]):
    log = tmp_path / "log"
    one = processes(tmp_path, source, log)
    assert line(one) == "building"
    two = processes(tmp_path, source, log)
    time.sleep(0.5)
    assert two.poll() is None
    go_on(one)
    assert line(one) == line(two) != ""
    assert log.read_text() == "begun\n"


# -- what leaves nothing --------------------------------------------------------------------------------------------


def test_a_killed_builder_leaves_nothing_that_counts(tmp_path: Path, source: Path, processes: Callable[..., Any]):
    one = processes(tmp_path, source, tmp_path / "log")
    assert line(one) == "building"
    os.kill(one.pid, signal.SIGKILL)
    one.wait()
    (partial,) = (path for path in (tmp_path / "images").iterdir() if path.is_dir())
    assert (partial / "half").exists()
    build = Builder()
    folder = prepared(tmp_path, "images", [source], {}, build)
    assert build.calls == 1
    assert [path for path in folder.parent.iterdir() if path.is_dir()] == [folder]


@pytest.mark.parametrize(
    "error", [DataError("bad"), ConnectionResetError("x"), KeyboardInterrupt(), ValueError("x"), MemoryError()]
)
def test_a_build_that_raises_leaves_nothing(error: BaseException, tmp_path: Path, source: Path):
    def build(folder: Path) -> None:
        (folder / "half").write_bytes(b"x")
        raise error

    with pytest.raises(type(error)):
        prepared(tmp_path, "images", [source], {}, build)
    assert [path.name for path in (tmp_path / "images").iterdir()] == [f"{digest([source], {})}.lock"]


def test_a_source_that_changes_meanwhile_is_told(tmp_path: Path, source: Path):
    def build(folder: Path) -> None:
        source.write_text("more and more")

    with pytest.raises(DataError, match=r"source\.csv: what was to be prepared changed meanwhile\. Start again"):
        prepared(tmp_path, "images", [source], {}, build)
    assert not [path for path in (tmp_path / "images").iterdir() if path.is_dir()]


def test_a_missing_source_is_told(tmp_path: Path):
    with pytest.raises(DataError, match=r"gone\.csv: No such file or directory.*workload\.data\.path"):
        prepared(tmp_path, "images", [tmp_path / "gone.csv"], {}, Builder())


# -- no room, no right ------------------------------------------------------------------------------------------------


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", place], capture_output=True).returncode:
        pytest.skip("mounting a small disk is not allowed here")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_full_disk_is_told_and_left_clean(full_disk: Path, source: Path):
    with pytest.raises(OSError, match="No space left on device"):  # a run's end says what to do
        prepared(full_disk, "images", [source], {}, Builder(pixels=b"x" * 2**20))
    assert not [path for path in (full_disk / "images").iterdir() if path.is_dir()]
