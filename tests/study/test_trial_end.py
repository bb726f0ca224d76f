"""Rows of trials that ended in every way there is."""

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.kit.made_trials import made_trial
from wellfed.record import entries
from wellfed.record.entries import RunRecord
from wellfed.study.objective import SAMPLES_PER_S
from wellfed.study.rows import Kept, Row, read_rows
from wellfed.study.trial_end import TrialEnd, open_trial_folder, why_of

BEGUN = made_trial("p")


def left(sweep: Path, *, stderr: str = "", **entries: Any) -> Path:
    """A trial's folder with its record, as a process that is dead has left it."""
    folder = sweep / "p"
    folder.mkdir()
    (folder / "stderr.txt").write_text(stderr)
    if entries:
        dead = subprocess.Popen([sys.executable, "-c", ""])
        dead.wait()
        made = RunRecord.start("p")
        made.pid = dead.pid
        for name, value in {"overrides": ["seed=1"], **entries}.items():
            setattr(made, name, value)
        made.write(folder)
    return folder


def ended(sweep: Path, exit_code: int, *, seconds: float = 2.0, timed_out: bool = False) -> Row:
    kept = Kept(sweep, SAMPLES_PER_S, "abc")
    return kept.end(BEGUN, TrialEnd(exit_code, seconds, timed_out, predicted_peak_gib=1.5))


def test_what_an_ok_trial_has_measured(tmp_path: Path) -> None:
    left(
        tmp_path,
        stderr="only a warning\n",
        status="ok",
        exit_code=0,
        started_at="2026-01-01T00:00:00+00:00",
        throughput={"samples_per_s": 100.0, "ci95": [99.0, 101.0], "steps": 40, "warmup_steps": 3},
        ceiling={"samples_per_s": 200.0},
        readiness_frac=0.5,
        machine={"cpu": "a CPU", "cpu_quota_cores": 2.0},
        memory={"measured_peak_gib": 0.25, "predicted_peak_gib": 0.5, "device": "cpu (x)"},
        gpus={"0": {"util_pct": {"mean": 80.0}}, "1": {"util_pct": {"mean": 60.0}}, "2": {"util_pct": None}},
    )
    row = ended(tmp_path, 0)
    assert (row.status, row.error, row.stderr, row.exit_code, row.seconds) == ("ok", None, (), 0, 2.0)
    assert (row.samples_per_s, row.ci95, row.steps) == (100.0, (99.0, 101.0), 40)
    assert (row.readiness_frac, row.ceiling_samples_per_s, row.util_pct) == (0.5, 200.0, 70.0)
    assert (row.peak_memory_gib, row.predicted_peak_gib, row.device) == (0.25, 0.5, "cpu (x)")
    assert row.machine == "a CPU, 2 cores"
    assert (row.point, row.overrides, row.code, row.folder) == ("p", ("seed=1",), "abc", "p")
    assert row.started_at == "2026-01-01T00:00:00+00:00"
    assert read_rows(tmp_path).rows == [row]


@pytest.mark.parametrize(
    ("gpus", "joules"),
    [
        ({"0": {"energy_per_sample_j": 0.5}, "1": {"energy_per_sample_j": 0.25}}, 0.75),
        ({"0": {"energy_per_sample_j": 0.5}, "1": {"energy_j": 3.0}}, None),
        ({}, None),
    ],
)
def test_the_energy_of_a_sample_is_that_of_all_its_gpus(tmp_path: Path, gpus: Any, joules: float | None) -> None:
    left(tmp_path, status="ok", exit_code=0, gpus=gpus)
    assert ended(tmp_path, 0).energy_per_sample_j == joules


def test_a_trial_on_the_cpu_has_no_figures_of_the_gpus_that_others_use(tmp_path: Path) -> None:
    plan = {"trainer.accelerator": {"value": "cpu", "because": "", "source": "set"}}
    gpus = {"0": {"util_pct": {"mean": 80.0}, "energy_per_sample_j": 0.5}}
    left(tmp_path, status="ok", exit_code=0, gpus=gpus, plan=plan)
    row = ended(tmp_path, 0)
    assert (row.util_pct, row.energy_per_sample_j) == (None, None)


@pytest.mark.parametrize(("status", "exit_code"), [("oom", 3), ("failed", 1), ("interrupted", 143)])
def test_a_trial_that_could_tell_is_believed(tmp_path: Path, status: str, exit_code: int) -> None:
    error = {"kind": "code", "message": "went wrong", "advice": "Mend it."}
    left(tmp_path, stderr="a\n\nb  \n", status=status, exit_code=exit_code, error=error)
    row = ended(tmp_path, exit_code)
    assert (row.status, row.error, row.exit_code, row.stderr) == (status, error, exit_code, ("a", "b"))


# Exit code of the process, what the row and the completed record say.
ENDS = [
    (-signal.SIGKILL, "killed", "host_oom", "ended by SIGKILL"),
    (-signal.SIGSEGV, "failed", "code", "crashed: SIGSEGV"),
    (7, "failed", "code", "last words"),
    (0, "failed", "code", "last words"),  # os._exit in the middle
    (3, "oom", "device_oom", "last words"),
]


@pytest.mark.parametrize(("exit_code", "status", "kind", "message"), ENDS)
def test_a_running_record_of_a_dead_process_is_completed(
    tmp_path: Path, exit_code: int, status: str, kind: str, message: str
) -> None:
    throughput = {"samples_per_s": 10.0, "ci95": None, "steps": 5, "warmup_steps": 3}
    folder = left(tmp_path, stderr="first\nlast words\n", status="running", throughput=throughput)
    row = ended(tmp_path, exit_code)
    assert row.error is not None
    assert (row.status, row.error["kind"], row.error["message"]) == (status, kind, message)
    assert (row.samples_per_s, row.steps) == (10.0, 5)  # what it has written before
    assert row.stderr == ("first", "last words")
    found = json.loads((folder / "run.json").read_text())
    assert (found["status"], found["exit_code"], found["error"]) == (status, exit_code, dict(row.error))
    assert entries.read(folder)["throughput"] == throughput


@pytest.mark.parametrize(("exit_code", "status", "kind", "message"), [*ENDS, (2, "invalid", "config", "last words")])
def test_without_a_record_the_end_of_the_process_tells(
    tmp_path: Path, exit_code: int, status: str, kind: str, message: str
) -> None:
    folder = left(tmp_path, stderr="first\nlast words\n")
    row = ended(tmp_path, exit_code)
    assert row.error is not None
    assert (row.status, row.error["kind"], row.error["message"]) == (status, kind, message)
    assert {path.name for path in folder.iterdir()} == {"stderr.txt", "run.json"}
    assert read_rows(tmp_path).rows == [row]


def test_one_that_took_too_long_is_a_timeout_though_it_was_killed(tmp_path: Path) -> None:
    folder = left(tmp_path, status="running")
    row = ended(tmp_path, -9, seconds=600.2, timed_out=True)
    assert row.error is not None
    assert (row.status, row.error["message"]) == ("timeout", "had not ended after 600 s")
    assert "sweep.timeout_s" in row.error["advice"]
    assert entries.read(folder)["status"] == "timeout"


@pytest.mark.parametrize("status", ["ok", "oom", "failed"])
def test_a_trial_that_ended_when_its_command_was_killed_is_a_row_of_that_code(tmp_path: Path, status: str) -> None:
    codes = {"ok": 0, "oom": 3, "failed": 1}
    error = None if status == "ok" else {"kind": "code", "message": "went wrong", "advice": ""}
    left(tmp_path, status=status, exit_code=codes[status], error=error, duration_s=3.5)
    for code in ("now", "later"):
        (row,) = Kept(tmp_path, SAMPLES_PER_S, code, adopted_code="then").found.rows
        assert (row.status, row.exit_code, row.error, row.seconds) == (status, codes[status], error, 3.5)
        assert row.code == "then"


@pytest.mark.parametrize("status", ["running", "killed", "interrupted"])
def test_a_trial_that_did_not_end_by_itself_is_no_row(tmp_path: Path, status: str) -> None:
    left(tmp_path, status=status)
    found = read_rows(tmp_path)
    assert (found.rows, [each.overrides for each in found.unfinished]) == ([], [["seed=1"]])


def test_a_trial_that_was_not_started_has_no_log_and_says_why(tmp_path: Path) -> None:
    end = TrialEnd(not_started="infeasible", message="needs 9 GiB", predicted_peak_gib=9.0)
    row = Kept(tmp_path, SAMPLES_PER_S, "abc").end(BEGUN, end)
    assert (row.status, row.folder, row.predicted_peak_gib) == ("infeasible", "", 9.0)
    assert (row.error or {})["message"] == "needs 9 GiB"
    assert read_rows(tmp_path).rows == [row]


def test_an_earlier_attempt_is_kept_beside_the_next_and_a_refusal_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "p"
    for number in range(3):
        open_trial_folder(folder)
        assert [*folder.iterdir()] == []
        (folder / "number").write_text(str(number))
    attempts = {"p": "2", "p.attempt1": "0", "p.attempt2": "1"}
    assert {path.name: (path / "number").read_text() for path in tmp_path.iterdir()} == attempts
    other = replace(BEGUN, point=replace(BEGUN.point, id="q"))
    Kept(tmp_path, SAMPLES_PER_S, "abc").end(other, TrialEnd(not_started="invalid", message="no such option"))
    open_trial_folder(tmp_path / "q")
    assert [*(tmp_path / "q").iterdir()] == []
    assert not (tmp_path / "q.attempt1").exists()


TRACEBACK = """\
Traceback (most recent call last):
  File "model.py", line 3, in forward
    return self.layer(x)
RuntimeError: mat1 and mat2 shapes cannot be multiplied
(22 frames of libraries are left out: all are in p/train.log)
"""


def test_a_failed_trial_has_the_errors_own_line_and_the_path_of_its_log(tmp_path: Path) -> None:
    left(tmp_path, stderr=TRACEBACK)
    row = ended(tmp_path, 1)
    assert row.error is not None
    assert row.error["message"] == "RuntimeError: mat1 and mat2 shapes cannot be multiplied"
    assert why_of(row.error, row.folder) == f"{row.error['message']} Log: p/stderr.txt"


def test_a_message_of_many_lines_fits_into_a_cell() -> None:
    lines = ["RuntimeError: Error(s) in loading state_dict for Net:", *("  size mismatch for layer" for _ in range(40))]
    told = why_of({"message": "\n".join(lines), "advice": "x" * 5000}, "p")
    assert told.startswith(f"{lines[0]} xxx")
    assert told.endswith("... Log: p/stderr.txt")
    assert len(told) < 700
    assert why_of({"message": "no such option"}, "") == "no such option"
