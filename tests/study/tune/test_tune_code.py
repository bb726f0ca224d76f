"""Which files make a tune begin anew, and the rows of a sweep those of other code."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from wellfed.config.schema import RunConfig
from wellfed.project import VARIABLE
from wellfed.study.objective import SAMPLES_PER_S
from wellfed.study.points.space import Choices
from wellfed.study.request import StudyRequest
from wellfed.study.study_screen import StudyScreen
from wellfed.study.sweep import SweepStudy
from wellfed.study.tune.start import tune_code


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With an option that a tune has written and somebody has committed."""
    for name in ("configs/train.yaml", "src/model.py", "configs/loader/mine.yaml", "configs/loader/baseline.yaml"):
        write(tmp_path, name, "first\n")
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return tmp_path


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True)


def commit(folder: Path) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "all")


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def code(checkout: Path, **choices: str) -> str:
    return tune_code([checkout / "configs"], choices, "mine")


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("src/model.py", True),
        ("src/new_model.py", True),
        ("configs/loader/baseline.yaml", True),
        ("configs/workload/new.yaml", True),
        # What tunes write: this one, and another.
        ("configs/loader/mine.yaml", False),
        ("configs/memory/mine.yaml", False),
        ("configs/loader/theirs.yaml", False),
        ("notes.txt", False),
    ],
)
def test_what_trials_run_counts_and_what_tunes_write_does_not(checkout: Path, name: str, counts: bool) -> None:
    before = code(checkout, workload="new", loader="baseline")
    write(checkout, name, "second\n")
    after = code(checkout, workload="new", loader="baseline")
    assert (after != before) is counts
    write(checkout, name, "third\n")
    assert (code(checkout, workload="new", loader="baseline") != after) is counts


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("src/new_model.py", True),
        ("configs/workload/new.yaml", True),
        ("configs/loader/theirs.yaml", True),
        ("configs/loader/other.yaml", False),
        # Options of the sweep itself.
        ("configs/sweep/own.yaml", False),
        ("configs/logger/own.yaml", False),
        ("notes.txt", False),
    ],
)
def test_what_points_of_a_sweep_run_counts(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, name: str, counts: bool
) -> None:
    """An option is named by all points, or by an axis."""
    monkeypatch.setattr("sys.argv", ["train.py"])
    choices = {"workload": "new", "sweep": "own", "logger": "own"}
    asked = StudyRequest("x", checkout, {"loader": Choices(("baseline", "theirs"))}, (), choices=choices)
    screen, none = StudyScreen(SAMPLES_PER_S), None

    def now() -> str:
        return SweepStudy(checkout, screen, none, RunConfig(), asked, none, none).code  # type: ignore[arg-type]

    before = now()
    write(checkout, name, "second\n")
    assert (now() != before) is counts


def test_the_lock_of_an_editor_does_not_count(checkout: Path) -> None:
    """Within a checkout and outside one."""
    for _ in range(2):
        before = code(checkout)
        (checkout / "src" / ".#model.py").symlink_to("me@here.1234")
        assert code(checkout) == before
        (checkout / "src" / ".#model.py").unlink()
        shutil.rmtree(checkout / ".git", ignore_errors=True)


def test_options_of_its_name_that_the_start_names_count(checkout: Path) -> None:
    """Where nothing is written the name may be the same."""
    before = code(checkout, loader="mine")
    write(checkout, "configs/loader/mine.yaml", "second\n")
    assert code(checkout, loader="mine") != before


def test_a_commit_counts_and_outside_a_checkout_the_version_of_wellfed(checkout, tmp_path_factory, monkeypatch) -> None:
    before = code(checkout)
    assert re.fullmatch(r"[0-9a-f]{10}, wellfed [\d.]+( at [0-9a-f]{10}\+?)?", before)
    write(checkout, "src/model.py", "second\n")
    commit(checkout)
    assert code(checkout) != before
    elsewhere = tmp_path_factory.mktemp("none")
    write(elsewhere, "configs/train.yaml", "")
    monkeypatch.setenv(VARIABLE, str(elsewhere))
    before = tune_code([], {}, "mine")
    assert before.startswith("wellfed ")
    write(elsewhere, "src/model.py", "first\n")
    assert tune_code([], {}, "mine") != before
