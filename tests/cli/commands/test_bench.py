"""``python -m wellfed bench``: rounds in turns against another commit."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.end_to_end.commands import ROOT, environment
from tests.kit.bench_project import git, make_project
from tests.kit.few import few
from wellfed.cli import main as cli
from wellfed.cli.commands import bench

TYPED = ("workload=forecast", "gpu=cpu")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose runs take no time, as the working directory."""
    found = make_project(tmp_path / "repository")
    monkeypatch.chdir(found)
    monkeypatch.setenv("WELLFED_PROJECT", str(found))
    monkeypatch.setattr(sys, "path", [*sys.path])  # commands put the project first
    return found


def written(project: Path) -> dict[str, Any]:
    (path,) = (project / "logs" / "forecast" / "benches").glob("*/bench.json")
    return json.loads(path.read_text())


def command_of(process: psutil.Process) -> str:
    """Returns its command line; empty if it has ended."""
    with suppress(psutil.Error):
        return str(process.cmdline())
    return ""


def is_clean(project: Path) -> bool:
    return len(git(project, "worktree", "list").splitlines()) == 1


def test_a_slower_working_tree_ends_it_with_one(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "src" / "rate.txt").write_text("80")
    assert cli.main(["bench", *TYPED, "--against", "HEAD", "--rounds", "3", "--max-slower", "5%"]) == 1
    out = capsys.readouterr().out
    head = git(project, "rev-parse", "HEAD")[:10]
    assert out.startswith(
        f"A: HEAD ({head})\nB: the working tree at {head}, with uncommitted changes\n3 rounds in turns, after one "
        "that does not count.\n"
    )
    assert re.search(
        r"^Round 2 of 3: A 100(\.\d+)? windows/s, B 80\.\d+ windows/s; B takes 1\.2\d times as long\.$", out, re.M
    )
    assert [line.split()[:2] for line in out.splitlines() if re.match(r"\d +[AB]", line)] == [
        ["1", "AB"],
        ["2", "BA"],
        ["3", "AB"],
    ]
    assert re.search(r"^Slower: B takes 2\d\.\d % more time a sample than A \(95 % interval \+2", out, re.M)
    found = written(project)
    assert [each["order"] for each in found["rounds"]] == ["AB", "BA", "AB"]
    assert found["sides"]["A"]["commit"].startswith(head)
    assert (found["sides"]["B"]["changed"], found["overrides"], found["problems"]) == (True, [*TYPED], [])
    ratios = [each["time_ratio"] for each in found["rounds"]]
    assert found["time_ratio"]["ci95"][0] < min(ratios) <= max(ratios) < found["time_ratio"]["ci95"][1]
    for each in found["rounds"]:
        for letter, folder in each["runs"].items():
            record = json.loads((project / folder / "run.json").read_text())
            assert record["throughput"]["samples_per_s"] == each["samples_per_s"][letter]
            assert (project / folder).parent.parent == project / "logs" / "forecast" / "benches"
    assert is_clean(project)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--against", "HEAD", "--rounds", "0"], "--rounds 0: is no number of rounds. Write --rounds 6."),
        (["--against", "nothing"], "--against nothing: is no commit, branch or tag of this repository."),
        (["--against", "HEAD", "loader=agressive"], "aggressive"),
        (["--against", "HEAD", "resume=auto"], "resume=auto: is about one training, and a bench starts many."),
        (["--against", "loader=balanced"], "Compare settings by a sweep"),
        (["--against", "HEAD", "paths.log_dir=src/rate.txt"], "paths.log_dir: src/rate.txt/forecast/benches can't be"),
    ],
)
def test_what_can_not_be_benched_is_told_before_anything_runs(
    project: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert cli.main(["bench", *TYPED, *words]) == 2
    assert told in capsys.readouterr().err
    assert not (project / "logs").exists()
    assert is_clean(project)


FAILS = {
    "exits": (
        "before.txt",
        "if folder.name == '2B': sys.exit('no such data')",
        r"B, the working tree: failed in round 2 \(exit code 1\): no such data What it printed: logs/.*/2B\.log",
    ),
    "is killed": (
        "before.txt",
        "import os\nif folder.name == '2B': os.kill(os.getpid(), 9)",
        r"B, the working tree: failed in round 2 \(ended by signal 9\): it left no record What it printed: ",
    ),
    "other work": (
        "after.txt",
        "record.config['workload']['scale'] = 2 if folder.name.endswith('B') else 1",
        r"workload: What is learned differs \(workload\.scale\)",
    ),
}


@pytest.mark.parametrize("kind", few(FAILS, 1))
def test_a_round_that_shows_nothing_gives_no_verdict(
    project: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    file, code, told = FAILS[kind]
    (project / "src" / file).write_text(code)
    git(project, "commit", "--quiet", "--all", "--message=second")
    assert cli.main(["bench", *TYPED, "--against", "HEAD", "--rounds", "3", "--max-slower", "5%"]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("No verdict: these runs can't be compared.\n")
    assert re.search(told, err)
    assert "lower:" not in out
    found = written(project)
    assert len(found["rounds"]) == (0 if kind == "other work" else 1)
    assert any(re.search(told, problem) for problem in found["problems"])
    assert is_clean(project)


@pytest.mark.slow
def test_a_bench_leaves_no_checkpoints_no_secrets_and_no_run_to_resume(project: Path) -> None:
    (project / "src" / "after.txt").write_text(
        "(folder / 'checkpoints').mkdir(); (folder / 'checkpoints' / 'last.ckpt').touch()\n"
        "print('https://user:PLANTED@example.org')"
    )
    git(project, "commit", "--quiet", "--all", "--message=second")
    assert cli.main(["bench", *TYPED, "--against", "HEAD", "--rounds", "1"]) == 0
    assert not [*project.rglob("*.ckpt")]
    assert not (project / "logs" / "forecast" / "runs").exists()
    (log,) = project.rglob("1A.log")
    assert "@example.org" in log.read_text()
    assert "PLANTED" not in log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_what_is_known_and_nothing_that_runs(project: Path, signum: signal.Signals) -> None:
    (project / "src" / "before.txt").write_text("if folder.name.startswith('2'): time.sleep(100)")
    command = [sys.executable, "-m", "wellfed", "bench", *TYPED, "--against", "HEAD", "--max-slower", "5%"]
    environ = environment(WELLFED_PROJECT=str(project), PYTHONPATH=str(ROOT / "src"))
    process = subprocess.Popen(
        command, cwd=project, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        until_s = time.monotonic() + 60
        while not (started := [each for each in psutil.Process(process.pid).children() if "/2B" in command_of(each)]):
            assert time.monotonic() < until_s
            time.sleep(0.05)
        os.kill(process.pid, signum)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, err) == (128 + signum, "")
    assert "Stopped after 1 of 6 rounds.\n" in out
    assert len(written(project)["rounds"]) == 1
    assert not psutil.wait_procs(started[:1], timeout=60)[1]  # init may reap it late
    assert is_clean(project)


def test_the_workflow_of_the_page_can_be_used() -> None:
    """It pins what our own workflows pin, pastes nothing into a shell, and its command is one."""
    page = (ROOT / "docs" / "slower_in_ci.md").read_text()
    (text,) = re.findall(r"^```yaml\n(name: speed.*?)^```", page, re.M | re.S)
    workflow = yaml.safe_load(text)
    ours = "".join(path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml"))
    uses = re.findall(r"uses: (\S+ # v\S+)", text)
    assert len(uses) == 2
    assert [one for one in uses if f"uses: {one}\n" not in ours] == []
    assert workflow["permissions"] == {"contents": "read"}
    (job,) = workflow["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert not any("${{" in command for command in commands)
    (typed,) = [shlex.split(command) for command in commands if "wellfed bench" in command]
    asked = bench._parser().parse_intermixed_args(typed[2:])
    assert (asked.against, asked.rounds, asked.max_slower) == ("$BASE", 6, 0.05)
    assert job["steps"][0]["with"] == {"persist-credentials": False, "fetch-depth": 0}
