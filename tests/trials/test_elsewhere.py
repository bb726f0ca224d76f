"""Trials that other machines run: what is made of their ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from wellfed.clusters.keeper import OrderEnd
from wellfed.record import RunRecord
from wellfed.sweep.ledger import Row
from wellfed.sweep.rows import started_at
from wellfed.trials import elsewhere

LOST = OrderEnd("node7", None, "its worker process was killed")


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A sweep with the record of a trial that ran out of memory."""
    folder = tmp_path / "p"
    folder.mkdir()
    made = RunRecord.start("p")
    made.status, made.exit_code, made.started_at = "oom", 3, "2026-01-01T00:00:00+00:00"
    made.write(folder)
    return tmp_path


def lost(sweep: Path, before: str | None) -> Row:
    return elsewhere.row_of_order(Row("p", "trial", (), "failed", 2, folder="p"), before, LOST, 1.5, sweep, "sweep")


def test_a_trial_that_is_lost_before_it_begins_leaves_the_earlier_attempt_as_it_is(earlier: Path) -> None:
    content = (earlier / "p" / "run.json").read_bytes()
    row = lost(earlier, started_at(earlier / "p"))
    assert (row.status, row.folder, row.host, row.seconds, row.attempt) == ("killed", "", "node7", 1.5, 2)
    assert row.error is not None
    assert row.error["message"] == LOST.problem
    assert (earlier / "p" / "run.json").read_bytes() == content


def test_a_trial_that_is_lost_while_it_runs_is_so_in_its_own_record(earlier: Path) -> None:
    row = lost(earlier, "2025-12-31T00:00:00+00:00")
    assert (row.status, row.folder, row.started_at) == ("killed", "p", "2026-01-01T00:00:00+00:00")
    assert json.loads((earlier / "p" / "run.json").read_text())["status"] == "killed"


def test_a_trial_that_is_lost_before_there_was_a_folder_has_none(tmp_path: Path) -> None:
    row = lost(tmp_path, None)
    assert (row.status, row.folder) == ("killed", "")
