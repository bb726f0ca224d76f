"""The door of the entry scripts: flags, exit codes, one message, and no torch on the way."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.few import few, slow
from wellfed import project
from wellfed.config.entry import main
from wellfed.errors import EXIT_OUT_OF_MEMORY, ConfigError, Fault

REPO = project.configs().parent

PROBE = """
import json, runpy, sys
script, *sys.argv[1:] = sys.argv[1:]
sys.argv[0] = script
code = None
try:
    runpy.run_path(script, run_name="__main__")
except SystemExit as stop:
    code = stop.code
heavy = sorted({"torch", "lightning", "numpy", "pandas", "wandb", "rich", "transformers"} & set(sys.modules))
print(json.dumps([code, heavy]), file=sys.stderr)
"""


def run(script: str | Path, *args: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """The entry script in a process of its own; the last line of stderr: its exit code and heavy modules."""
    command = [sys.executable, "-c", PROBE, str(REPO / "src" / script), *args]
    variables = {**os.environ, "PYTHONPATH": str(REPO / "src"), **env}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=variables)


CONSOLE = """
import runpy, sys
from wellfed.__main__ import run
sys.argv[0] = "wellfed"
sys.exit(run())
"""
"""What an installer writes as ``.venv/bin/wellfed``."""


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["--help"], 0, "  monitor "),
        slow(["train", "--help"], 0, "wellfed train gpu=24gb loader=aggressive"),
        slow(["train", "--cfg", "job"], 0, "effective_batch_size: 2048"),
        slow(["train", "gpu=42gb"], 2, "gpu=42gb"),
        slow(["train", "sweep=quick"], 2, "Add -m: wellfed train -m sweep=quick"),
        slow(["sweep", "gpu=42gb"], 2, "gpu=42gb"),
        slow(["tune", "--force", "--cfg", "job"], 0, "replace: true"),
        slow(["train", "--force"], 2, "unrecognized arguments: --force"),
        slow(["tune", "tune.round=3"], 2, "1 fault in the configuration; nothing was run."),
        slow(["evaluate", "checkpoint=none.ckpt"], 2, "checkpoint=none.ckpt: there is no such file."),
    ],
)
def test_the_command_answers_before_torch(args, code, words, tmp_path):
    script = tmp_path / "wellfed"
    script.write_text(CONSOLE)
    (tmp_path / "here").mkdir()
    done = run(script, *args, cwd=tmp_path / "here")
    *told, last = done.stderr.splitlines()
    assert json.loads(last) == [code, []]
    assert words in done.stdout + "\n".join(told)
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.parametrize(
    ("script", "args", "code", "words"),
    [
        slow("train.py", ["--help"], 0, "python src/train.py gpu=24gb loader=aggressive"),  # test_imports.py
        slow("train.py", ["--cfg", "job"], 0, "effective_batch_size: 2048"),
        (
            "train.py",
            ["gpu=42gb", "loader.num_worker=3", "gpu=["],
            2,
            "3 faults in the configuration; nothing was run.",
        ),
        slow(
            "train.py",
            ["loader.num_workers=0", "loader.prefetch_factor=4"],
            2,
            "has no effect without worker processes",
        ),
        slow("tune.py", ["--help", "tune.max_minutes=7"], 0, "for this machine: a few minutes, at most 7"),
        slow("tune.py", ["gpu=42gb", "tune.round=3", "seed=x"], 2, "3 faults in the configuration; nothing was run."),
        slow("tune.py", ["resume=auto"], 2, "an interrupted tune goes on by the same command"),
        slow("tune.py", ["-m", "seed=1,2"], 2, "-m: runs a grid, and a tune is one search."),
        slow("evaluate.py", ["--help"], 0, "python src/evaluate.py checkpoint="),
        slow("evaluate.py", [], 2, "logs: there is no run in logs yet. python src/train.py makes one."),
        (
            "evaluate.py",
            ["checkpoint=a b (x)=y/it's.ckpt"],
            2,
            "checkpoint=a b (x)=y/it's.ckpt: there is no such file.",
        ),
        # The quoting: tests/config/test_quoting.py and the case above.
        slow("evaluate.py", ["--cfg", "job", "checkpoint=a=b (c).ckpt"], 0, "checkpoint: a=b (c).ckpt"),
    ],
)
def test_answers_before_torch(script, args, code, words, tmp_path):
    done = run(script, *args, cwd=tmp_path)
    *told, last = done.stderr.splitlines()
    assert json.loads(last) == [code, []]
    assert words in done.stdout + "\n".join(told)
    assert "Traceback" not in done.stderr
    assert (done.stdout == "") == (code == 2)
    assert list(tmp_path.iterdir()) == []


class Jobs:
    """Remembers what it was called with."""

    def __init__(self, *codes: int) -> None:
        self.codes = list(codes) or [0]
        self.seen = []

    def __call__(self, composed):
        self.seen.append(composed)
        return self.codes[min(len(self.seen), len(self.codes)) - 1]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level  # --info logs to a stream that the test closes


def test_a_plain_run_makes_no_folder_and_returns_the_jobs_code(tmp_path):
    jobs = Jobs(EXIT_OUT_OF_MEMORY)
    assert main("train", jobs, ["gpu=8gb", "seed=3"]) == EXIT_OUT_OF_MEMORY
    assert jobs.seen[0].overrides == ("gpu=8gb", "seed=3")
    assert jobs.seen[0].run_dir is None
    assert list(tmp_path.iterdir()) == []


def test_overrides_and_flags_may_be_mixed(capsys):
    assert main("train", Jobs(), ["seed=3", "--cfg", "job", "gpu=8gb"]) == 0
    shown = capsys.readouterr().out
    assert "seed: 3" in shown
    assert "memory_gib: 7.2" in shown
    assert "num_workers: null" in shown


def test_expand_rewrites_the_overrides():
    jobs = Jobs()
    assert main("train", jobs, ["seed=3"], expand=lambda overrides, _: ["gpu=8gb", *overrides]) == 0
    assert jobs.seen[0].overrides == ("gpu=8gb", "seed=3")


def test_expand_may_refuse(capsys):
    def expand(overrides, compose):
        raise ConfigError([Fault("resume=x", "is no run folder.", "Name one.")])

    assert main("train", Jobs(), ["resume=x"], expand=expand) == 2
    assert "resume=x: is no run folder. Name one." in capsys.readouterr().err


def test_faults_go_to_stderr_and_the_job_is_not_called(capsys):
    jobs = Jobs()
    assert main("train", jobs, ["gpu=42gb"]) == 2
    assert jobs.seen == []
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("1 fault in the configuration; nothing was run.\n  - gpu=42gb:")


def test_the_traceback_on_request(capsys, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert main("train", Jobs(), ["gpu=42gb"]) == 2
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert "MissingConfigException" in shown
    assert "gpu=42gb: there is no option 42gb." in shown


@pytest.mark.parametrize(
    "flags",
    few(
        [
            *(["--help"], ["--cfg", "job"], ["--info", "defaults"], ["-m"]),
            *map(slow, (["--cfg", "hydra"], ["--info", "all"])),
        ],
        2,
    ),
)
def test_faults_are_told_by_every_flag(capsys, flags):
    assert main("train", Jobs(), [*flags, "gpu=42gb", "loader.num_worker=3"]) == 2
    assert "2 faults in the configuration" in capsys.readouterr().err
    assert "HYDRA_FULL_ERROR" not in os.environ


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        slow(["--hydra-help"], "== Flags =="),
        slow(["--info", "searchpath"], "structured://"),
        (["--info", "plugins"], "BasicLauncher"),
        (["--cfg", "hydra", "-p", "hydra.job"], "name: train"),
        slow(["--cfg", "job", "-p", "gpu"], "# @package gpu"),
        slow(["--cfg", "job", "--resolve"], "log_dir: logs"),
        (["--help", "loader=baseline"], "baseline*"),
    ],
)
def test_flags_keep_their_meaning(capsys, flags, words):
    assert main("train", Jobs(), flags) == 0
    assert words in capsys.readouterr().out


def test_version_and_unknown_flags(capsys):
    with pytest.raises(SystemExit) as stop:
        main("train", Jobs(), ["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith("Hydra 1.")
    for unknown in ("--lr", "-x"):
        with pytest.raises(SystemExit) as stop:
            main("train", Jobs(), [unknown])
        assert stop.value.code == 2
        assert f"unrecognized arguments: {unknown}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--resolve"], "--resolve"),
        (["-m", "--cfg", "job"], "only one of"),
        (["--cfg", "job", "--info"], "only one of"),
        (["--experimental-rerun", "x.pickle"], "Write rerun=<run folder>."),
        (["--config-name", "nope"], "there is no such file. There are: evaluate, train, tune"),
        (["--config-dir", "nope"], "is no folder"),
        (["--config-path", "nope"], "is no folder of configurations"),
    ],
)
def test_flags_that_make_no_sense(capsys, flags, words):
    assert main("train", Jobs(), flags) == 2
    assert words in capsys.readouterr().err


def test_config_dir_name_and_path(tmp_path):
    (tmp_path / "mine" / "gpu").mkdir(parents=True)
    (tmp_path / "mine" / "gpu" / "laptop.yaml").write_text("memory_gib: 3.5\n")
    (tmp_path / "mine" / "short.yaml").write_text("defaults: [train, _self_]\ntrainer: {max_epochs: 1}\n")
    jobs = Jobs()
    assert main("train", jobs, ["--config-dir", "mine", "--config-name", "short", "gpu=laptop"]) == 0
    assert jobs.seen[0].config.gpu.memory_gib == 3.5
    assert jobs.seen[0].config.trainer.max_epochs == 1
    assert main("train", jobs, ["--config-path", "../configs", "gpu=8gb"]) == 0


def test_a_sweep_option_needs_multirun(capsys, tmp_path):
    (tmp_path / "mine" / "sweep").mkdir(parents=True)
    (tmp_path / "mine" / "sweep" / "tiny.yaml").write_text("# @package _global_\nseed: 2\n")
    jobs = Jobs()
    assert main("train", jobs, ["--config-dir", "mine", "sweep=tiny"]) == 2
    assert jobs.seen == []
    assert "Add -m: python src/train.py -m sweep=tiny" in capsys.readouterr().err


def sweep(*points: str) -> list[str]:
    return ["-m", "hydra.sweep.dir=swept", "hydra/sweeper=basic", "hydra/launcher=basic", *points]


def test_multirun_calls_the_job_for_each_point(tmp_path):
    jobs = Jobs(1, 0)
    assert main("train", jobs, sweep("seed=3,4", "gpu=8gb")) == 0
    assert [composed.config.seed for composed in jobs.seen] == [3, 4]
    assert [composed.overrides for composed in jobs.seen] == [("seed=3", "gpu=8gb"), ("seed=4", "gpu=8gb")]
    assert [composed.run_dir for composed in jobs.seen] == [tmp_path / "swept" / "0", tmp_path / "swept" / "1"]
    assert jobs.seen[0].choices["gpu"] == "8gb"


@pytest.mark.slow
def test_multirun_fails_when_no_job_is_ok():
    assert main("train", Jobs(1, 3), sweep("seed=3,4")) == 1


@pytest.mark.slow
def test_one_bad_point_does_not_hide_the_rest(capsys):
    jobs = Jobs()
    assert main("train", jobs, sweep("trainer.devices=0,1")) == 0
    assert [composed.config.trainer.devices for composed in jobs.seen] == [1]
    assert "trainer.devices=0: must be >= 1." in capsys.readouterr().err
    assert main("train", jobs, sweep("trainer.devices=0,-1")) == 1


@pytest.mark.parametrize(
    ("points", "words"),
    [
        slow(["gpu=8gb,43gb"], "gpu=8gb,43gb: there is no option 43gb."),
        slow(["seed=3,x"], "seed=x: must be a whole number >= 0"),
        (["loader.num_worker=1,2"], "loader.num_worker=1: no such knob. Did you mean loader.num_workers=1?"),
    ],
)
def test_an_axis_that_can_not_be_composed(capsys, points, words):
    jobs = Jobs()
    assert main("train", jobs, sweep(*points)) == 2
    assert jobs.seen == []
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_a_signal_ends_a_multirun_not_only_its_job(tmp_path):
    seen = []

    def stopped_at_the_second(composed):
        seen.append(composed.config.seed)
        return 130 if len(seen) == 2 else 0

    assert main("train", stopped_at_the_second, [*sweep("seed=1,2,3"), f"hydra.sweep.dir={tmp_path}"]) == 130
    assert seen == [1, 2]


def test_ctrl_c_while_composing_is_130_without_a_traceback(monkeypatch, capsys):
    def interrupted(overrides, compose):
        raise KeyboardInterrupt

    assert main("train", lambda composed: 0, [], expand=interrupted) == 130
    assert capsys.readouterr().err == ""
