"""Callbacks and schedulers of a configuration, in runs of a plain workload."""

import csv
import shutil
from pathlib import Path

import pytest
import torch

from tests.end_to_end.commands import only_folder, record_of, run, train

QUICK = ("logger=none", "loader.backend=inline", "workload.schedule.name=constant", "trainer.log_every_steps=4")
STOPPING = (
    "callbacks=[early_stopping,ema,lr_monitor]",
    "callbacks.early_stopping.monitor=val/ndcg_at_10",
    "callbacks.early_stopping.mode=max",
    "callbacks.ema.decay=0.5",
)
PLATEAU = (
    "workload.schedule._target_=torch.optim.lr_scheduler.ReduceLROnPlateau",
    "workload.schedule.monitor=val/ndcg_at_10",
    "workload.schedule.patience=0",
)


def rates(folder: Path) -> dict[int, float]:
    with (folder / "metrics.csv").open() as file:
        return {int(row["step"]): float(row["value"]) for row in csv.DictReader(file) if row["name"] == "lr"}


@pytest.mark.slow
def test_callbacks_and_a_plateau_of_a_plain_model_and_what_is_left_of_them(tmp_path: Path) -> None:
    limits = ("trainer.max_epochs=3", "trainer.checkpoint_every_steps=3", "trainer.keep_last=99")
    done = train(*QUICK, *STOPPING, *PLATEAU, *limits, cwd=tmp_path)
    assert done.code == 0, done.text
    folder = only_folder(tmp_path)
    record = record_of(folder)
    assert record["plan"]["callbacks"]["value"] == "early_stopping, ema, lr_monitor"
    assert record["ceiling"]["samples_per_s"] > 0
    assert rates(folder)[max(rates(folder))] in (0.01, 0.001, 0.0001), "ReduceLROnPlateau goes by the mean loss"
    done = run("evaluate.py", f"checkpoint={folder / 'checkpoints' / 'best.ckpt'}", cwd=tmp_path)
    assert done.code == 0, done.text
    assert f"test/ndcg_at_10 {record['metrics']['test/ndcg_at_10']:.6g}" in done.out, "the average was tested"
    assert "Warning" not in done.err
    checkpoint = tmp_path / "cut" / "run" / "checkpoints" / "last-3.ckpt"
    shutil.copytree(folder, tmp_path / "cut" / "run")
    step = torch.load(checkpoint, weights_only=True)["global_step"]
    assert 0 < step < record["steps"]
    (tmp_path / "elsewhere").mkdir()
    done = train(f"resume={checkpoint}", cwd=tmp_path / "elsewhere")
    assert done.code == 0, done.text
    ends = [only_folder(where) / "checkpoints" / "last.ckpt" for where in (tmp_path, tmp_path / "elsewhere")]
    whole, resumed = (torch.load(path, weights_only=True) for path in ends)
    for part in ("callbacks", "lr_schedulers", "optimizer_states", "current_model_state", "state_dict"):
        assert str(whole[part]) == str(resumed[part]), part
    for name, value in whole["current_model_state"].items():
        assert torch.equal(value, resumed["current_model_state"][name]), name


@pytest.mark.slow
def test_early_stopping_ends_a_run_well(tmp_path: Path) -> None:
    impossible = ("callbacks.early_stopping.min_delta=9", "callbacks.early_stopping.patience=1")
    done = train(*QUICK, *STOPPING, *impossible, "trainer.max_epochs=9", cwd=tmp_path)
    assert done.code == 0, done.text
    record = record_of(only_folder(tmp_path))
    assert (record["status"], record["epochs"]) == ("ok", 2)
    assert "did not improve" in record["ended_by"]
