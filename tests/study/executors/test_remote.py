"""The process that runs a trial on another machine: what it makes sure of before it reads the trial."""

import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kit.made_trials import made_settings, made_trial
from tests.run.folder.test_lock import holder
from wellfed.config.compose import compose
from wellfed.process import MAY_FORK
from wellfed.project import root, source_digest
from wellfed.study.executors import remote
from wellfed.study.executors.remote import Needs, closed_by, order_of, process_start
from wellfed.study.executors.trial_process import run_process

pytestmark = pytest.mark.skipif(not MAY_FORK, reason="forks")


@pytest.fixture
def needs(tmp_path: Path) -> Needs:
    alive = tmp_path / "alive"
    alive.touch()
    return Needs(str(tmp_path), str(alive), str(root()), source_digest(), "abc", ("train.py", "-m"))


def test_a_machine_with_this_code_that_sees_the_study_is_fit(needs: Needs) -> None:
    assert remote.find_problem(needs) == ""


def test_a_process_of_other_code_ends_before_it_reads_the_trial(needs: Needs) -> None:
    settings = made_settings(Path(needs.study))
    order = order_of(replace(needs, source="0123456789ab"), settings, made_trial("a"))
    answer = run_process(process_start(), order)
    assert answer.is_unfit
    assert answer.problem.startswith(f"it has other code ({root()}: ")
    assert "and the study has abc; digest " in answer.problem
    assert "not 0123456789ab). Bring it to the same" in answer.problem


def test_a_folder_that_is_another_one_there_is_named(needs: Needs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_SEEN_WITHIN_S", 0)
    Path(needs.alive).unlink()
    problem = remote.find_problem(needs)
    assert problem.startswith(f"it does not see the study's folder {needs.study}.")
    assert "paths.log_dir" in problem


def test_a_folder_that_can_not_be_written_there_is_named(needs: Needs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) != (needs.study, os.W_OK))
    assert remote.find_problem(needs).startswith(f"it can't write to the study's folder {needs.study}.")


def test_no_trial_starts_after_the_study_was_told_to_start_no_more(needs: Needs) -> None:
    closed_by(Path(needs.alive)).touch()
    assert remote.find_problem(needs) == "no further trial is started."


def test_the_process_is_started_with_the_code_of_this_checkout() -> None:
    start = process_start()
    assert start.python_path[0] == str(root() / "src")
    assert all(Path(folder).is_absolute() for folder in start.python_path)


@pytest.mark.slow
def test_a_trial_whose_folder_is_held_is_a_row_and_its_machine_stays_fit(needs: Needs) -> None:
    """A user has resumed it there by hand."""
    trial = made_trial("a")
    composed = compose(["workload=forecast", "gpu=cpu", "loader=baseline", "logger=none", "telemetry=none"])
    settings, folder = made_settings(Path(needs.study)), Path(needs.study) / "a"
    folder.mkdir()
    soon = f"from wellfed.study.executors import local; local.FREE_WITHIN_S = 1; {process_start().program}"
    with holder(folder) as other:
        order = order_of(needs, settings, replace(trial, composed=composed))
        answer = run_process(replace(process_start(), program=soon), order)
    assert not answer.is_unfit, answer.problem
    assert answer.content is not None
    row = pickle.loads(answer.content)
    assert row.status == "failed"
    assert f"another process is writing to it (process {other.pid} on " in row.error["message"]
