"""Cards that are lost, not there, too few or too small: message, record and exit code, and no hang."""

import json
from pathlib import Path

import pytest

from tests.end_to_end.commands import Done, record_of, run_folders, train
from tests.fake_cuda.machine import FakeCuda

QUICK = ("trainer.max_steps=6", "logger=none", "telemetry.ceiling_steps=0")


def is_told(done: Done, *texts: str) -> None:
    """In a message, not in a traceback."""
    assert "Traceback" not in done.err, done.err
    for text in texts:
        assert text in done.err


@pytest.fixture(scope="module")
def launches(fake_cuda: FakeCuda, tmp_path_factory: pytest.TempPathFactory) -> int:
    """Of a whole run."""
    folder = tmp_path_factory.mktemp("whole")
    done = train(*QUICK, cwd=folder, **fake_cuda.environment(mib=8192, report=folder / "report"))
    assert done.code == 0, done.text
    return max(json.loads(line)["launches"] for line in (folder / "report").read_text().splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("after_frac", [0, 0.1, 0.3, 0.5, 0.7, 0.8, 0.95])
def test_a_lost_card_ends_a_run_with_a_record(
    tmp_path: Path, fake_cuda: FakeCuda, launches: int, after_frac: float
) -> None:
    """In the probe, the first batch, a backward pass, the validation, the test: wherever that many launches lead."""
    lost = fake_cuda.environment(mib=8192, lost_after=int(after_frac * launches))
    done = train(*QUICK, "trainer.validate_every_steps=2", "trainer.checkpoint_every_steps=1", cwd=tmp_path, **lost)
    is_told(done, "CUDA error: unspecified launch failure", "dmesg")
    folders = run_folders(tmp_path)
    assert done.code == (1 if folders else 2)
    for folder in folders:
        record = record_of(folder)
        assert (record["status"], record["exit_code"], record["error"]["kind"]) == ("failed", 1, "code")
        assert "unspecified launch failure" in record["error"]["message"]
    if after_frac in (0, 0.95):  # before the first batch, after the last
        assert len(folders) == round(after_frac)


@pytest.mark.slow
def test_a_rank_whose_card_is_lost_ends_the_others_with_its_reason(tmp_path: Path, fake_cuda: FakeCuda) -> None:
    cards = fake_cuda.environment(cards=2, mib=8192) | {"FAKE_CUDA_LOST_AFTER": "1:900"}
    done = train("trainer.max_steps=40", *QUICK[1:], "trainer=ddp", "trainer.devices=2", cwd=tmp_path, **cards)
    assert done.code == 1, done.text
    is_told(done, "CUDA error: unspecified launch failure", "dmesg")
    (folder,) = run_folders(tmp_path)
    assert record_of(folder)["status"] == "failed"
    assert "unspecified launch failure" in record_of(folder)["error"]["message"]


@pytest.mark.slow
def test_a_run_goes_on_with_a_card_that_works_again(tmp_path: Path, fake_cuda: FakeCuda, launches: int) -> None:
    """It is lost after the launches of a whole run of 6 steps, so in the midst of 40."""
    steps = ("trainer.max_steps=40", *QUICK[1:], "trainer.checkpoint_every_steps=1")
    done = train(*steps, cwd=tmp_path, **fake_cuda.environment(mib=8192, lost_after=launches))
    assert done.code == 1, done.text
    done = train(*steps, "resume=auto", cwd=tmp_path, **fake_cuda.environment(mib=8192))
    assert done.code == 0, done.text
    (folder,) = run_folders(tmp_path)
    assert (record_of(folder)["status"], record_of(folder)["steps"]) == ("ok", 40)
