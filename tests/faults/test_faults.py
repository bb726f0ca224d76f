"""The planted faults, and that the harness notices what a run may not say."""

from pathlib import Path

import pytest
import torch

from tests.end_to_end.commands import Done
from tests.faults.cases import FAULTS, Fault
from tests.faults.harness import Box, judge
from wellfed.record import RunRecord


def box_with(
    folder: Path, *, status: str, steps: int, saved: int | None, err: str, code: int = 0, record: str = ""
) -> Box:
    """What a run of so many steps left, whose latest checkpoint is of the step ``saved``."""
    box = Box(folder)
    run = folder / "logs" / "planted" / "runs" / "2026-01-01_00-00-00_beef"
    (run / "checkpoints").mkdir(parents=True)
    found = RunRecord(run_id="beef", workload="planted", status=status, steps=steps)  # type: ignore[arg-type]
    (run / "run.json").write_text(record or found.to_json())
    if saved is not None:
        torch.save({"global_step": saved, "state_dict": {}}, run / "checkpoints" / "last.ckpt")
    box.done = Done(code, "", err)
    return box


def faults_of(box: Box) -> str:
    """What is wrong with a run that should have ended well."""
    return "; ".join(judge(box, "planted", (0,), ("ok",), "", resumes=False).faults)


def test_a_run_that_kept_what_it_says_is_sound(tmp_path: Path) -> None:
    assert not faults_of(box_with(tmp_path, status="ok", steps=24, saved=24, err=""))


@pytest.mark.parametrize(
    ("status", "saved", "err", "code", "record", "wrong"),
    [
        ("ok", 8, "", 0, "", "ok, and the weights of step 24 are nowhere"),
        ("ok", None, "", 0, "", "ok, and the weights of step 24 are nowhere"),
        ("ok", 24, "", 1, "", "exit code 1"),
        ("failed", 24, "", 0, "", "status failed"),
        ("failed", 8, "something failed", 0, "", "16 steps are lost, and no line says"),
        ("failed", 8, "last saved step 16 of 24", 0, "", "says last saved step 16"),
        ("failed", None, "resume=auto goes on from step 8", 0, "", "there is no checkpoint"),
        ("ok", 24, 'File "/x/src/wellfed/run/train.py", line 1', 0, "", "traceback"),
        ("ok", 24, "", 0, "{", "can't be read"),
    ],
)
def test_what_a_run_may_not_say_is_noticed(
    tmp_path: Path, status: str, saved: int | None, err: str, code: int, record: str, wrong: str
) -> None:
    box = box_with(tmp_path, status=status, steps=24, saved=saved, err=err, code=code, record=record)
    assert wrong in faults_of(box)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.kind)
def test_every_fault_is_survived(tmp_path: Path, fault: Fault) -> None:
    case = fault.tried(tmp_path)
    if case.skipped:
        pytest.skip(case.skipped)
    assert not case.faults, case


def test_every_fault_has_a_name_of_its_own() -> None:
    assert len({fault.kind for fault in FAULTS}) == len(FAULTS) >= 60
