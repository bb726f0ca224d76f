import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import wellfed
from wellfed.commands import cli
from wellfed.errors import (
    ConfigError,
    DataError,
    Fault,
    OutOfMemoryExhausted,
    WellfedError,
)

WITH_SOURCE = {**os.environ, "PYTHONPATH": str(Path(wellfed.__file__).parents[1])}


def python_m_wellfed(*words):
    return subprocess.run([sys.executable, "-m", "wellfed", *words], capture_output=True, text=True, env=WITH_SOURCE)


def command_that(monkeypatch, act):
    monkeypatch.setattr(cli, "COMMANDS", (cli.Command("go", "goes"),))
    monkeypatch.setattr(cli.importlib, "import_module", lambda name: SimpleNamespace(main=act))


def test_an_unknown_command_lists_the_commands():
    done = python_m_wellfed("docter")
    assert done.returncode == 2
    assert done.stderr.startswith("python -m wellfed docter: there is no such command. Did you mean doctor?\n")
    for command in cli.COMMANDS:
        assert f"  {command.name}" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_nothing_close_suggests_nothing(capsys):
    assert cli.main(["zzz"]) == 2
    assert "Did you mean" not in capsys.readouterr().err


def test_help_and_no_word(capsys):
    assert cli.main(["--help"]) == 0
    assert cli.main(["-h"]) == 0
    assert capsys.readouterr().out.count("usage: python -m wellfed <command>") == 2
    assert cli.main([]) == 2
    assert "usage: python -m wellfed <command>" in capsys.readouterr().err


@pytest.mark.parametrize("command", cli.COMMANDS, ids=lambda command: command.name)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([command.name, "--help"])
    out, err = capsys.readouterr()
    assert (stop.value.code, err) == (0, "")
    assert out.startswith(f"usage: python -m wellfed {command.name}")


def test_help_as_typed():
    done = python_m_wellfed("plan", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: python -m wellfed plan")


def test_an_unknown_option_ends_with_2():
    done = python_m_wellfed("doctor", "--jsn")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_the_rest_of_the_words_and_the_code_pass_through(monkeypatch):
    command_that(monkeypatch, lambda argv: len(argv) + 40)
    assert cli.main(["go", "a", "b"]) == 42


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError([Fault("gpu", "wrong", "do this")]), 2),
        (DataError("no such file"), 2),
        (OutOfMemoryExhausted("tried all"), 3),
        (WellfedError("other"), 1),
    ],
)
def test_a_users_error_is_its_message_and_its_code(monkeypatch, capsys, error, code):
    def fail(argv):
        raise error

    command_that(monkeypatch, fail)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    assert cli.main(["go"]) == code
    assert capsys.readouterr().err == f"{error}\n"
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(type(error)):
        cli.main(["go"])


def test_ctrl_c_ends_with_130(monkeypatch):
    def interrupt(argv):
        raise KeyboardInterrupt

    command_that(monkeypatch, interrupt)
    assert cli.main(["go"]) == 130
