"""How a study ends, whatever ends it, and the folder for what trials share."""

import errno
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from wellfed.errors import ConfigError
from wellfed.process import STOPS
from wellfed.study.objective import SAMPLES_PER_S
from wellfed.study.study import Study, StudyScreen, scratch_folder

ANY: Any = None


@pytest.fixture(autouse=True)
def signals_of_before() -> Iterator[None]:
    """A study that was stopped ignores further signals until its process ends; here the process goes on."""
    before = {number: signal.getsignal(number) for number in STOPS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@dataclass
class Tiny(Study):
    """A study that does what a test says."""

    work: Callable[[], None] = lambda: None
    copy: Callable[[], None] = lambda: None
    finished: int = 0

    def run(self) -> None:
        (self.folder / "sweep.json").touch()
        self.work()

    def finish(self) -> int:
        self.finished += 1
        return 0

    def publish(self) -> None:
        self.copy()


def tiny(folder: Path, work: Callable[[], None] = lambda: None, copy: Callable[[], None] = lambda: None) -> Tiny:
    return Tiny(folder, StudyScreen(SAMPLES_PER_S), work, copy)


def raises(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ranks_what_is_there_and_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int, code: int
) -> None:
    study = tiny(tmp_path / "new", lambda: os.kill(os.getpid(), number))
    assert (study.go(), study.finished) == (code, 1)
    assert capsys.readouterr().out.splitlines() == ["Stopped. The same command again goes on."]


def test_a_full_disk_ranks_what_is_there_and_names_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = tiny(tmp_path / "new", raises(OSError(errno.ENOSPC, "No space left on device", "sweep.json")))
    study.way_on = "The same command with search.name=x"
    assert (study.go(), study.finished) == (0, 1)
    said = "Stopped: No space left on device (sweep.json). Make room, then the same command with search.name=x goes on."
    assert " ".join(capsys.readouterr().out.split()) == said


def test_a_refused_configuration_leaves_no_new_folder_and_keeps_an_old_one(tmp_path: Path) -> None:
    refused = raises(ConfigError.of("a=b", "is wrong.", "Leave it out."))
    with pytest.raises(ConfigError):
        tiny(tmp_path / "new", refused).go()
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "sweep.json").touch()
    with pytest.raises(ConfigError):
        tiny(tmp_path / "old", refused).go()
    assert (tmp_path / "old" / "sweep.json").exists()


def test_scratch_is_empty_and_goes_whatever_a_killed_sweep_has_left(tmp_path: Path) -> None:
    left = tmp_path / ".scratch"
    left.mkdir()
    (left / "rows.pt").write_text("half")
    with scratch_folder(left) as folder:
        assert list(folder.iterdir()) == []
        (folder / "rows.pt").write_text("whole")
    assert not left.exists()
