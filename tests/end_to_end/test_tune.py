"""``python src/tune.py`` as its user meets it, whatever becomes of the start, the trials and the tune itself."""

import json
import os
import shlex
import shutil
import signal
import subprocess
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.end_to_end.commands import ROOT, Done, record_of, run
from tests.end_to_end.many_processes import started, until
from wellfed.process import MAY_FORK
from wellfed.study.rows import Row, read_rows

pytestmark = pytest.mark.skipif(not MAY_FORK, reason="forks")
PLANTED = ROOT / "tests" / "study" / "sweep" / "planted"
PATH = os.pathsep.join(filter(None, [str(ROOT / "tests" / "kit"), os.environ.get("PYTHONPATH")]))
NAME = "mine"


def measured(rows: list[Row]) -> list[tuple[object, ...]]:
    """What a trial leaves by itself; its study may have been stopped before it noted the end."""
    return [(row.point, row.kind, row.status, row.started_at, row.samples_per_s, row.value) for row in rows]


@dataclass(frozen=True)
class Tuned:
    """A finished command and what it has left."""

    done: Done
    cwd: Path
    rows: list[Row]
    """As they were then."""

    @property
    def folder(self) -> Path:
        return folder_of(self.cwd)

    @property
    def file(self) -> dict[str, Any]:
        return json.loads((self.folder / "tune.json").read_text())

    @property
    def command(self) -> list[str]:
        """The words of the line to use."""
        (line,) = [line for line in self.done.out.splitlines() if line.startswith("Use it: python src/train.py")]
        return shlex.split(line)[4:]


def folder_of(cwd: Path) -> Path:
    return cwd / "logs" / "planted" / "tunes" / NAME


def configs_of(cwd: Path) -> Path:
    """A copy of the project's, which alone is written to."""
    if not (cwd / "configs").exists():
        shutil.copytree(ROOT / "configs", cwd / "configs")
        shutil.copy(PLANTED / "planted.yaml", cwd / "configs" / "workload")
    return cwd / "configs"


def arguments(cwd: Path, *more: str) -> list[str]:
    """A start that reads sample by sample, 16 ms a batch: the data can give whole batches at no such price."""
    data = ["workload=planted", "+workload.data.read_s=0.001"]
    fixed = [*data, "loader=baseline", "logger=none"]
    short = ["telemetry.ceiling_steps=3", "sweep.trial_steps=40", "tune.max_trials=2", "tune.rounds=3"]
    return [f"--config-path={configs_of(cwd)}", f"tune.name={NAME}", *fixed, *short, *more]


def tune(cwd: Path, *more: str, **variables: str) -> Tuned:
    words = list({word.partition("=")[0]: word for word in arguments(cwd, *more)}.values())
    done = run("tune.py", *words, cwd=cwd, PYTHONPATH=PATH, **variables)
    return Tuned(done, cwd, list(read_rows(folder_of(cwd)).rows))


def tuning(cwd: Path, *more: str) -> AbstractContextManager[subprocess.Popen[str]]:
    return started("tune.py", arguments(cwd, *more), cwd=cwd, python_path=PATH)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    """Written whatever the noise of this machine."""
    return tune(tmp_path_factory.mktemp("tuned"), "tune.write=always")


# In make test: test_tuning.py (verdict and line), test_turns.py and test_written_experiment.py in tests/study/tune.
# Trials in processes of their own: test_sweep.py.
@pytest.mark.slow
def test_a_tune_tells_what_it_turned_and_ends_with_the_line_to_use(tuned: Tuned) -> None:
    assert tuned.done.code == 0, tuned.done.text
    assert "Traceback" not in tuned.done.text
    lines = tuned.done.out.splitlines()
    assert lines[0].startswith("Tuning planted on ")
    assert any(line.startswith("1. the start: ") for line in lines)
    assert any(line.startswith("2. ") and ("kept: " in line or "dropped: " in line) for line in lines)
    assert lines[-1].startswith("Use it: python src/train.py --config-path=")
    assert tuned.command[-1] == f"experiment={NAME}"


@pytest.mark.slow
def test_the_line_to_use_runs_what_was_measured(tuned: Tuned) -> None:
    words = [*tuned.command, "trainer.max_steps=5", "logger=none", "hydra.run.dir=used"]
    done = run("train.py", *words, cwd=tuned.cwd, PYTHONPATH=PATH)
    assert done.code == 0, done.text
    found, measured = record_of(tuned.cwd / "used")["plan"], set()
    for row in tuned.rows:
        plan = record_of(tuned.folder / row.folder)["plan"]
        measured.add(json.dumps([plan[f"loader.{knob}"]["value"] for knob in ("backend", "num_workers")]))
    assert json.dumps([found[f"loader.{knob}"]["value"] for knob in ("backend", "num_workers")]) in measured
    file = yaml.safe_load((tuned.cwd / "configs" / "experiment" / f"{NAME}.yaml").read_text())
    assert file["loader"]["backend"] == found["loader.backend"]["value"]


@pytest.mark.slow
def test_the_same_command_measures_nothing_twice(tmp_path: Path) -> None:
    first = tune(tmp_path, "tune.write=always")
    again = tune(tmp_path, "tune.write=always")
    assert again.done.code == 0, again.done.text
    assert again.done.out.startswith("Going on in ")
    assert again.rows == first.rows
    assert again.command == first.command


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
@pytest.mark.parametrize("rows", [1, 3])
def test_an_interrupted_tune_goes_on(tmp_path: Path, signum: int, code: int, rows: int) -> None:
    """In the search, and in the comparison, where half a round is lost."""
    words = ["loader.num_workers=0", "tune.write=never"]
    with tuning(tmp_path, *words) as process:
        until(lambda: len(read_rows(folder_of(tmp_path)).rows) >= rows, process)
        process.send_signal(signum)
        out, err = process.communicate(timeout=60)
        assert process.returncode == code, out + err
    if signum != signal.SIGKILL:
        assert out.splitlines()[-1] == "Stopped. The same command again goes on."
        assert json.loads((folder_of(tmp_path) / "tune.json").read_text())["status"] == "stopped"
    assert "Traceback" not in err
    before = read_rows(folder_of(tmp_path)).rows
    again = tune(tmp_path, *words)
    assert again.done.code == 0, again.done.text
    assert measured(again.rows[: len(before)]) == measured(before)
    assert Counter(row.point for row in again.rows if row.kind == "trial").most_common(1)[0][1] == 1
    assert again.file["status"] == "done"
    comparison = again.file["comparison"]
    assert comparison is not None, again.file["steps"]
    assert len(comparison["before"]) == len(comparison["after"]) == 3
