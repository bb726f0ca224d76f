"""Damaged bytes of every file that is read, and that the limits of the fuzzing itself hold."""

import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fuzz import __main__ as command
from tests.fuzz import child
from tests.fuzz.child import fuzz, fuzz_with
from tests.fuzz.readers import READERS, Reader

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits are those of Linux")
IS_FRESH = os.environ.get("HYPOTHESIS_PROFILE") == "fresh"
SLOW = {"record", "replayed", "steps", "metrics", "telemetry", "option", "overrides", "mat"}
"""Readers that take longer than 20 ms for a file."""
CHECKED_BEFORE = {
    "png",
    "jpg",
    "webp",
    "tiff",
    "bmp",
    "wav",
    "flac",
    "checkpoint",
    "foreign_checkpoint",
    "resumed_checkpoint",
    "overrides",
}
"""Readers whose callers open no named pipe. Other tests cover that."""
ANY_SIZE = {
    *("optuna", "series", "wav", "flac", "ratings_data", "ratings_user", "ratings_item", "overrides"),
}
"""Readers of files that sound ones may be as large as, and of what the test itself reads."""


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_damaged_bytes_are_read_or_refused(reader: Reader) -> None:
    examples = (8 if reader.name in SLOW else 40) * (4 if IS_FRESH else 1)
    outcome = fuzz(reader, examples=examples, fresh=random.randrange(2**32) if IS_FRESH else None)
    assert not outcome.fault, f"{outcome.fault}\n{(outcome.culprit or b'')[:2000]!r}"
    assert outcome.inputs >= min(examples, 5)


@pytest.mark.parametrize(
    "reader", [reader for reader in READERS if reader.name not in CHECKED_BEFORE], ids=lambda reader: reader.name
)
def test_a_named_pipe_in_place_of_a_file_keeps_no_reader_waiting(reader: Reader) -> None:
    outcome = fuzz_with(reader, os.mkfifo)
    assert not outcome.fault


def grow(path: Path) -> None:
    """Makes a file of NUL bytes that has no space in memory. They take none on the disk."""
    with path.open("wb") as stream:
        stream.truncate(child.MOST_BYTES + 2**28)


@pytest.mark.parametrize(
    "reader", [reader for reader in READERS if reader.name not in ANY_SIZE], ids=lambda reader: reader.name
)
def test_a_file_of_gib_is_read_or_refused(reader: Reader) -> None:
    outcome = fuzz_with(reader, grow)
    assert not outcome.fault


def test_readers_have_names_of_their_own() -> None:
    assert len({reader.name for reader in READERS}) == len(READERS)


def text_reader(read: Callable[[str], object]) -> Reader:
    """Returns a reader of a text file."""
    return Reader(
        "text",
        "x.txt",
        lambda folder: (folder / "x.txt").write_text("sound"),
        lambda folder: read((folder / "x.txt").read_bytes().decode(errors="replace")),
    )


def only_sound(act: Callable[[], object]) -> Callable[[str], object]:
    """Returns a reader that acts on damaged text."""
    return lambda text: None if text == "sound" else act()


def raise_key_error() -> None:
    raise KeyError("damaged")


def loop() -> None:
    while True:
        pass


@pytest.mark.parametrize(
    ("act", "fault"),
    [
        (raise_key_error, "KeyError: 'damaged'"),
        (lambda: bytearray(3 * 2**30), "MemoryError"),
        (lambda: os.system("true"), "code was run: ['os.system']"),
        (lambda: subprocess.run(["true"], check=False), "code was run: ['subprocess.Popen'"),
        (lambda: Path("ran").write_text(""), "code was run: ['writes "),
        (lambda: os._exit(0), "ended without a result"),
        (loop, "longer than 1 s"),
        (os.abort, "SIGABRT"),
    ],
)
def test_what_a_reader_may_not_do_is_noticed(
    act: Callable[[], object], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "MOST_SECONDS", 1)
    outcome = fuzz(text_reader(only_sound(act)), examples=20, shrinks=False)
    assert fault in outcome.fault
    assert outcome.culprit not in (None, b"sound")


def test_an_input_that_went_wrong_is_kept_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "CORPUS", tmp_path)
    bad = text_reader(only_sound(raise_key_error))
    outcome = fuzz(bad, examples=20, shrinks=False)
    assert outcome.keep().read_bytes() == outcome.culprit
    again = fuzz(bad, examples=1)
    assert (again.inputs, again.culprit) == (1, outcome.culprit)
    mended = replace(bad, read=lambda folder: None)
    assert not fuzz(mended, examples=20).fault


@pytest.mark.parametrize(
    ("act", "fault"), [(loop, "longer than 1 s"), (os.abort, "SIGABRT"), (raise_key_error, "KeyError")]
)
def test_the_command_keeps_an_input_after_any_end(
    act: Callable[[], object],
    fault: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(child, "MOST_SECONDS", 1)
    monkeypatch.setattr(child, "CORPUS", tmp_path)
    for module in (child, command):
        monkeypatch.setattr(module, "READERS", (text_reader(only_sound(act)),))
    monkeypatch.setattr(command, "CONTEXT", "fork")  # so that the process has this reader
    assert command.main(["--minutes", "5", "--seed", "7", "--jobs", "1"]) == 1
    (kept,) = (tmp_path / "text").iterdir()
    printed = capsys.readouterr().out
    assert fault in printed
    assert str(kept) in printed
    assert 'again: make fuzz ARGS="--only text --seed 7"' in printed
    before = kept.read_bytes()
    kept.unlink()
    assert command.main(["--minutes", "5", "--seed", "7", "--jobs", "1"]) == 1
    assert kept.read_bytes() == before
