"""A run that trains its encoder from an epoch on, as a user types it: left and resumed, on a card, and mistyped."""

from pathlib import Path

import pytest
import torch

from tests.end_to_end.commands import FAST, record_of, run, run_folders, weights_of
from tests.fake_cuda.machine import FakeCuda

STAGES = "memory.stages=[{from_epoch: 0, features: cache}, {from_epoch: 2, features: dynamic}]"
LEARNS = (
    "workload.model.train_encoder=true",
    "workload.effective_batch_size=512",
    "trainer.max_epochs=3",
    "logger=none",
    "workload.schedule.name=constant",
)


@pytest.mark.slow
def test_a_run_resumed_across_the_change_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole = run("train.py", *FAST, *LEARNS, STAGES, "hydra.run.dir=whole", cwd=tmp_path)
    assert whole.code == 0, whole.text
    record = record_of(tmp_path / "whole")
    (event,) = (event for event in record["events"] if event["kind"] == "stage")
    steps = record["throughput"]["steps"]
    assert (event["epoch"], event["features"]) == (2, "dynamic")
    assert event["joined"] > 0
    assert f"stage at step {event['step']}" in whole.out
    for left_at in (event["step"] - 1, event["step"], event["step"] + 1):
        folder = f"left{left_at}"
        left = run(
            "train.py", *FAST, *LEARNS, STAGES, f"hydra.run.dir={folder}", f"trainer.max_steps={left_at}", cwd=tmp_path
        )
        assert left.code == 0, left.text
        resumed = run("train.py", f"resume={folder}", "trainer.max_steps=null", cwd=tmp_path)
        assert resumed.code == 0, resumed.text
        ours, theirs = (weights_of(tmp_path / name) for name in (folder, "whole"))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        kinds = [event["kind"] for event in record_of(tmp_path / folder)["events"]]
        assert kinds.count("stage") == 1
    assert steps > 0


@pytest.mark.slow
def test_on_a_card_the_record_has_its_memory_before_and_after(tmp_path: Path, fake_cuda: FakeCuda) -> None:
    cards = fake_cuda.environment(cards=1, mib=2048)
    done = run("train.py", *FAST, *LEARNS, STAGES, cwd=tmp_path, **cards)
    assert done.code == 0, done.text
    (folder,) = run_folders(tmp_path)
    record = record_of(folder)
    (event,) = (event for event in record["events"] if event["kind"] == "stage")
    table_gib = 4 * 64 * 751 / 2**30  # of the 380 users and 371 items, at least
    assert event["device_gib_before"] - event["device_gib_after"] >= 0.9 * table_gib
    assert [stage["features"] for stage in record["plan"]["memory.stages"]["value"]] == ["cache", "dynamic"]
    assert record["memory"]["measured_peak_gib"] <= 1.1 * record["memory"]["predicted_peak_gib"] + 0.05
