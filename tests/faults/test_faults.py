"""Plants every fault, and checks that the harness notices each false claim."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.end_to_end.commands import Done
from tests.faults import page
from tests.faults.cases import FAULTS, Fault
from tests.faults.harness import Box, Expected, judge
from wellfed.record import RunRecord


def box_with(
    folder: Path, *, status: str, steps: int, saved: int | None, err: str, code: int = 0, record: str = ""
) -> Box:
    """Returns a box with a run of ``steps`` steps, whose latest checkpoint is of the step ``saved``."""
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
    """Returns the faults of a run that should have ended well."""
    return "; ".join(judge(box, "planted", Expected((0,), ("ok",), resumes=False)).faults)


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
    assert len({fault.kind for fault in FAULTS}) == len(FAULTS) >= 120


def test_a_checkpoint_that_was_saved_and_is_gone_is_noticed(tmp_path: Path) -> None:
    box = box_with(tmp_path, status="killed", steps=24, saved=8, err="")
    expected = Expected((0,), ("killed",), resumes=False, keeps=16)
    assert "step 16 was saved, and the checkpoints that load are of [8]" in judge(box, "planted", expected).faults


def test_rows_that_are_written_twice_are_noticed(tmp_path: Path) -> None:
    box = box_with(tmp_path, status="ok", steps=24, saved=24, err="")
    (box.run / "steps.csv").write_text("step,loss\n1,0.5\n2,0.4\n2,0.4\n")
    assert "rows twice: ['2']" in faults_of(box)


CUT = """
import os, sys
from pathlib import Path
Path("logs").mkdir()
Path("logs/old").write_text("old")
from durable import Durable
Durable.record()

def write(name, text, flush):
    with open(name, "w") as file:
        file.write(text)
        file.flush()
        if flush:
            os.fsync(file.fileno())

write("logs/dropped", "x", False)
write("logs/flushed", "y", True)
write("logs/tmp", "new", True)
os.replace("logs/tmp", "logs/old")
if "folder" in sys.argv:
    os.fsync(os.open("logs", os.O_RDONLY))
Durable.cut_power(keeps_names="names" in sys.argv)
"""


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (["names"], {"dropped": "", "flushed": "y", "old": "new"}),
        ([], {"old": "old"}),
        (["folder"], {"dropped": "", "flushed": "y", "old": "new"}),
    ],
)
def test_a_power_cut_leaves_what_was_flushed(tmp_path: Path, words: list[str], left: dict[str, str]) -> None:
    variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", CUT, *words], cwd=tmp_path, env=variables, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()} == left


RECORDED = [theme for theme in page.HEADS if [*page.RECORDS.glob(f"*_{theme}_cpu.json")]]


@pytest.mark.parametrize("theme", RECORDED)
def test_the_page_shows_the_newest_record(theme: str) -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.with_table(text, page.latest(theme)) == text
