import subprocess
import sys
from pathlib import Path

import pytest

import wellfed
from wellfed.command_line import command, is_command, set_arguments, typed_arguments

MODULE = str(Path(wellfed.__file__).with_name("__main__.py"))
STARTED = {
    "script": (["src/train.py", "gpu=8gb"], False, "python src/train.py", "python -m wellfed plan"),
    "console": ([".venv/bin/wellfed", "train", "gpu=8gb"], True, "wellfed train", "wellfed plan"),
    "windows": (["C:/venv/Scripts/wellfed.exe", "train", "gpu=8gb"], True, "wellfed train", "wellfed plan"),
    "module": ([MODULE, "train", "gpu=8gb"], True, "python src/train.py", "python -m wellfed plan"),
    "other package": (["lib/other/__main__.py", "gpu=8gb"], False, "python src/train.py", "python -m wellfed plan"),
}


@pytest.mark.parametrize("started", STARTED)
def test_commands_are_shown_as_this_process_was_started(started: str, monkeypatch: pytest.MonkeyPatch) -> None:
    argv, starts_with_name, train, plan = STARTED[started]
    monkeypatch.setattr(sys, "argv", argv)
    assert (is_command(), typed_arguments()) == (starts_with_name, ["gpu=8gb"])
    assert (command("train"), command("plan")) == (train, plan)


@pytest.mark.parametrize("started", ["script", "console", "module"])
def test_other_words_for_other_ranks_keep_the_way_of_starting(started: str, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = list(STARTED[started][0])
    argv[1:] = [word.replace("train", "tune") for word in argv[1:]]
    monkeypatch.setattr(sys, "argv", argv)
    set_arguments(["seed=2"])
    assert typed_arguments() == ["seed=2"]
    assert sys.argv[:-1] == STARTED[started][0][:1] + ([] if started == "script" else ["tune"])
    set_arguments(["seed=3"], script=Path("/project/src/train.py"))
    assert sys.argv == (["/project/src/train.py"] if started == "script" else [argv[0], "train"]) + ["seed=3"]


def test_started_by_its_path_the_files_beside_it_are_no_modules_of_their_own() -> None:
    """The engine has files called record.py and batches.py, which must not hide a user's."""
    probe = "import runpy, sys; sys.argv = [sys.argv[1], '--version']; sys.path[:1] = ['beside it', 'the next']\n"
    probe += (
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\nexcept SystemExit as end: print(end.code, sys.path[0])"
    )
    done = subprocess.run([sys.executable, "-c", probe, MODULE], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"wellfed {wellfed.__version__}", "0 the next"]
