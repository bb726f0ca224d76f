import io
import logging
import sys
from dataclasses import replace

import pytest

from tests.kit.composed import compose
from tests.kit.evidence_of import walled
from wellfed.record.entries import RunRecord
from wellfed.run import train
from wellfed.run.folder.log import log_file
from wellfed.run.folder.resume import Target
from wellfed.run.folder.run_folder import RunFolder
from wellfed.run.train import SPIN_COUNT, set_environment


@pytest.mark.parametrize(
    ("before", "overrides", "after"),
    [
        ({}, [], {"GOMP_SPINCOUNT": SPIN_COUNT}),
        ({"GOMP_SPINCOUNT": "7"}, [], {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, [], {"OMP_WAIT_POLICY": "ACTIVE"}),
        (
            {},
            ["gpu.allocator=expandable"],
            {"GOMP_SPINCOUNT": SPIN_COUNT, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        ),
    ],
)
def test_what_torch_reads_once_is_set_unless_the_user_did(before, overrides, after):
    set_environment(before, compose(overrides).config)
    assert before == after


@pytest.mark.parametrize(("rank", "asks"), [("0", True), ("3", False)])
def test_git_is_asked_for_the_record_that_stays(tmp_path, monkeypatch, rank, asks):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(train, "own_git_state", lambda: {"commit": "0123", "dirty": False, "changed": [], "digest": ""})
    record = train.begin_record(compose(), RunFolder(tmp_path, is_new=True), None)
    assert (record.git is not None) is asks


@pytest.mark.parametrize("in_place", [True, False])
def test_the_time_of_earlier_parts_is_kept_in_the_folder_of_the_run(tmp_path, in_place):
    wall, phases = walled(steps_s=9.0, start_s=1.0), {"train": {"total_s": 10.0, "times": 1}}
    record = RunRecord.start("r")
    for _ in range(2):  # resumed, killed before it recorded anything, and resumed again
        earlier = replace(record, wall=wall, phases=phases) if record.wall is None else record
        target = Target(tmp_path / "last.ckpt", in_place, earlier)
        record = train.begin_record(compose(), RunFolder(tmp_path, is_new=not in_place), target)
        assert (record.wall, record.phases) == ((wall, phases) if in_place else (None, {}))


def test_a_warning_goes_to_whatever_is_stderr_by_then(tmp_path, monkeypatch):
    """A bar that is drawn puts itself there: what was written beside it would tear it."""
    with log_file(tmp_path / "train.log"):
        monkeypatch.setattr(sys, "stderr", bar := io.StringIO())
        logging.getLogger("wellfed").warning("look")
    assert bar.getvalue() == "WARNING: look\n"
    assert "look" in (tmp_path / "train.log").read_text()
