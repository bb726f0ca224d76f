import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import wellfed
from wellfed.cli import main as cli
from wellfed.errors import ConfigError, DataError, Fault, OutOfMemoryExhausted, WellfedError

REPO = Path(__file__).parents[2]
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


def test_help_and_no_word(capsys):
    assert cli.main(["--help"]) == 0
    assert cli.main(["-h"]) == 0
    assert capsys.readouterr().out.count("usage: python -m wellfed <command>") == 2
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"wellfed {wellfed.__version__}\n"
    assert cli.main([]) == 2
    assert "usage: python -m wellfed <command>" in capsys.readouterr().err


ENTRIES = ("train", "tune", "evaluate", "sweep", "search")


@pytest.mark.parametrize("name", ENTRIES)
def test_entry_commands_show_the_help_of_their_configuration(name, capsys):
    assert cli.main([name, "--help"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert f"python src/{'train' if name in ('sweep', 'search') else name}.py" in out


@pytest.mark.parametrize(
    "command", [each for each in cli.COMMANDS if each.name not in ENTRIES], ids=lambda command: command.name
)
def test_every_other_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([command.name, "--help"])
    out, err = capsys.readouterr()
    assert (stop.value.code, err) == (0, "")
    assert out.startswith(f"usage: python -m wellfed {command.name}")


def test_an_unknown_option_ends_with_2():
    done = python_m_wellfed("doctor", "--jsn")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


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


@pytest.mark.parametrize(
    ("typed", "run"),
    [
        (["sweep"], ["-m", "sweep=throughput"]),
        (["sweep", "gpu=8gb", "sweep=quick"], ["-m", "gpu=8gb", "sweep=quick"]),
        (["sweep", "sweep.max_trials=3"], ["-m", "sweep=throughput", "sweep.max_trials=3"]),
        (["search", "seed=1,2"], ["-m", "search=optuna", "seed=1,2"]),
        (["search", "search=grid", "seed=1,2"], ["-m", "search=grid", "seed=1,2"]),
        (["train", "sweep=quick"], ["sweep=quick"]),
    ],
)
@pytest.mark.parametrize("script", ["wellfed", "notebook.py"])
def test_sweep_and_search_are_words_of_train(monkeypatch, typed, run, script):
    """Other ranks are started by the command line: it has the words of train, too."""
    seen = []
    monkeypatch.setattr(
        cli.importlib, "import_module", lambda name: SimpleNamespace(train=lambda argv: seen.append((name, argv)) or 0)
    )
    monkeypatch.setattr(sys, "argv", [script, *typed])
    assert cli.main(typed) == 0
    assert seen == [("wellfed.cli.commands.entry_scripts", run)]
    assert sys.argv == [script, *(["train", *run] if script == "wellfed" else typed)]


def outside_of_projects(monkeypatch):
    """Removes variable and script that name a project, as if a shell had started the command."""
    monkeypatch.delenv("WELLFED_PROJECT")
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)


def test_the_command_finds_its_project_and_the_projects_packages(tmp_path, monkeypatch, capsys):
    outside_of_projects(monkeypatch)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan"]) == 2
    err = capsys.readouterr().err
    assert f"project: neither {tmp_path} nor a folder around it has configs/train.yaml. Change to the folder" in err
    shutil.copytree(REPO / "configs", tmp_path / "configs")
    (tmp_path / "src" / "cats").mkdir(parents=True)
    (tmp_path / "src" / "cats" / "model.py").write_text("class Net:\n    def __init__(self, **sizes): ...\n")
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert cli.main(["train", "--cfg", "job", "workload.model._target_=cats.model.Net"]) == 0
    assert "cats.model.Net" in capsys.readouterr().out
    assert sys.path[0] == str(tmp_path / "src")


@pytest.mark.parametrize(
    "words",
    [["--version"], ["doctor", "--json"], ["monitor", "--seconds", "0.1"], ["runs"], ["cache", "list"]],
)
def test_commands_that_need_no_project_work_outside_of_one(tmp_path, monkeypatch, capsys, words):
    outside_of_projects(monkeypatch)
    monkeypatch.chdir(tmp_path)
    code = cli.main(words)
    out, err = capsys.readouterr()
    assert "project" not in err
    assert (code, out != "") == ((2, False) if words == ["runs"] else (0, True)), err


@pytest.mark.parametrize("script", ["train", "tune", "evaluate"])
def test_an_entry_script_without_the_engine_says_so_in_one_line(tmp_path, script):
    shutil.copy(REPO / "src" / f"{script}.py", tmp_path)
    done = subprocess.run([sys.executable, "-S", f"{script}.py"], cwd=tmp_path, env={}, capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert line.startswith("The package wellfed is not installed for ")
    assert "source .venv/bin/activate" in line
    assert "make train makes .venv" in line
