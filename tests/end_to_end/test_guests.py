"""A finished LightningModule of a user's own: whatever it does, its run ends ok and can be gone on with."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.end_to_end.commands import Done, only_folder, record_of, run, train_own
from tests.end_to_end.guest_module import hooks
from tests.fake_cuda.machine import FakeCuda
from tests.kit.few import slow

YAML = """
name: guest
effective_batch_size: 16
model:
  _target_: guest_module.{model}
data:
  _target_: guest_module.data
"""
STEPS_PER_EPOCH = 7


@pytest.fixture
def user(tmp_path: Path) -> Path:
    """A user's own configuration folder and module."""
    shutil.copy(Path(__file__).with_name("guest_module.py"), tmp_path)
    folder = tmp_path / "configs" / "workload"
    folder.mkdir(parents=True)
    for name, model in (("guest", "Guest"), ("two", "TwoOptimizers")):
        (folder / f"{name}.yaml").write_text(YAML.format(model=model))
    return tmp_path


def guest(user: Path, *arguments: str, workload: str = "guest", **more: Any) -> Done:
    """Train it."""
    return train_own(user, workload, "loader.backend=inline", *arguments, **more)


def evaluated(user: Path, folder: Path) -> Done:
    """Evaluate the best checkpoint of a run."""
    where = ("--config-dir", str(user / "configs"))
    checkpoint = f"checkpoint={folder / 'checkpoints' / 'best.ckpt'}"
    return run("evaluate.py", *where, checkpoint, cwd=user, PYTHONPATH=str(user))


def figures(folder: Path) -> dict[str, dict[int, float]]:
    """``metrics.csv`` as ``{split/name: {step: value}}``; a figure is written once a step."""
    found: dict[str, dict[int, float]] = {}
    with (folder / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            at = found.setdefault(f"{row['split']}/{row['name']}", {})
            assert int(row["step"]) not in at, row
            at[int(row["step"])] = float(row["value"])
    return found


def content(folder: Path, name: str = "last.ckpt") -> dict[str, Any]:
    return torch.load(folder / "checkpoints" / name, map_location="cpu", weights_only=True)


def test_a_guest_with_all_that_lightning_offers_ends_ok(user: Path) -> None:
    done = guest(user, "trainer.max_epochs=3", "trainer.log_every_steps=5")
    assert done.code == 0, done.text
    folder = only_folder(user, "guest")
    record = record_of(folder)
    assert (record["status"], record["steps"], record["samples"]) == ("ok", 21, 300)
    assert {"val/loss", "test/loss", "train/loss", "train/residual"} <= set(record["metrics"])
    seen = figures(folder)
    assert set(seen["val/loss"]) == {7, 14, 21}
    assert set(seen["train/own/figure"]) >= {0, 1, 20}
    rates = seen["train/lr-AdamW"]  # LearningRateMonitor's
    assert rates == pytest.approx({0: 0.01, 7: 0.001, 14: 0.0001}), "ReduceLROnPlateau did not see val_loss"
    assert record["ceiling"]["samples_per_s"] > 0
    assert set(hooks(user).values()) == {1, 3}, hooks(user)
    assert hooks(user)["on_train_epoch_end"] == 3


@pytest.mark.slow
def test_its_checkpoints_hold_what_loads_weights_only(user: Path) -> None:
    done = guest(user, "trainer.max_epochs=1")
    assert done.code == 0, done.text
    folder = only_folder(user, "guest")
    for name in ("last.ckpt", "best.ckpt"):
        assert content(folder, name)["hyper_parameters"] == {
            "dropout": 0.5,
            "where": "somewhere",
            "nested": {"width": 3},
        }
    (line,) = [line for line in done.err.splitlines() if "hyper_parameters.scaler" in line]
    assert "hyper_parameters.layers" in line
    assert "hyper_parameters.activation" in line
    tested = record_of(folder)["metrics"]["test/loss"]
    done = evaluated(user, folder)
    assert done.code == 0, done.text
    assert f"test/loss {tested:.6g}" in done.out


@pytest.mark.parametrize(
    ("workload", "steps_a_batch", "cut_after"),
    [
        slow("guest", 1, 3),
        slow("two", 2, STEPS_PER_EPOCH),
        slow("guest", 1, STEPS_PER_EPOCH),
        slow("two", 2, 3),
    ],
)
def test_a_resumed_guest_learns_what_the_unbroken_one_does(
    user: Path, workload: str, steps_a_batch: int, cut_after: int
) -> None:
    num_steps, at = 3 * STEPS_PER_EPOCH * steps_a_batch, cut_after * steps_a_batch
    every_step = ("trainer.max_epochs=3", "trainer.checkpoint_every_steps=1", f"trainer.keep_last={num_steps}")
    done = guest(user, *every_step, workload=workload)
    assert done.code == 0, done.text
    unbroken = only_folder(user, "guest")
    behind = (num_steps - at) // steps_a_batch  # checkpoints
    shutil.copytree(unbroken, user / "cut" / "run")
    checkpoint = user / "cut" / "run" / "checkpoints" / f"last-{behind}.ckpt"
    assert torch.load(checkpoint, weights_only=True)["global_step"] == at
    (user / "elsewhere").mkdir()
    done = guest(user, f"resume={checkpoint}", "trainer.max_epochs=3", workload=workload, cwd=user / "elsewhere")
    assert done.code == 0, done.text
    resumed = only_folder(user / "elsewhere", "guest")
    whole, cut = content(unbroken), content(resumed)
    for name, value in whole["state_dict"].items():
        assert torch.equal(value, cut["state_dict"][name]), name
    assert str(whole["optimizer_states"]) == str(cut["optimizer_states"])
    assert str(whole["lr_schedulers"]) == str(cut["lr_schedulers"])
    assert str(whole["callbacks"]) == str(cut["callbacks"])
    assert str(whole["rng"]["torch"].tolist()) == str(cut["rng"]["torch"].tolist())
    assert [record_of(folder)["steps"] for folder in (unbroken, resumed)] == [num_steps, num_steps]
    assert [record_of(folder)["epochs"] for folder in (unbroken, resumed)] == [3, 3]
    seen, again = figures(unbroken)["val/loss"], figures(resumed)["val/loss"]
    assert again == {step: value for step, value in seen.items() if step > at}


@pytest.mark.parametrize("workload", [slow("guest"), slow("two")])
def test_on_nan_raise_ends_a_guest_before_a_checkpoint_has_nan(user: Path, workload: str) -> None:
    done = guest(
        user,
        "trainer.max_epochs=2",
        "+workload.data.poison=3",
        "trainer.log_every_steps=50",
        "trainer.checkpoint_every_steps=2",
        workload=workload,
    )
    assert done.code == 1, done.text
    assert "trainer.on_nan" in done.err
    assert "Traceback" not in done.err
    for path in (only_folder(user, "guest") / "checkpoints").glob("*.ckpt"):
        state = torch.load(path, weights_only=True)["state_dict"]
        assert all(value.isfinite().all() for value in state.values()), path


@pytest.mark.slow
def test_two_ranks_count_each_sample_of_a_guest_once(user: Path) -> None:
    """Epochs end with a step whose ranks have unequal shares."""
    num_train = 97
    states, records = [], []
    for devices in (1, 2):
        cwd = user / f"{devices}"
        cwd.mkdir()
        done = guest(
            user,
            "trainer.max_epochs=2",
            f"trainer.devices={devices}",
            "trainer.accelerator=cpu",
            f"+workload.data.num_train={num_train}",
            "+workload.model.dropout=0",
            cwd=cwd,
        )
        assert done.code == 0, done.text
        states.append(content(only_folder(cwd, "guest"))["state_dict"])
        records.append(record_of(only_folder(cwd, "guest")))
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=0, atol=2e-6, msg=name)
    assert [record["samples"] for record in records] == [2 * num_train] * 2
    alone, both = (record["metrics"] for record in records)
    for name in ("val/loss", "test/loss"):
        assert both[name] == pytest.approx(alone[name], rel=1e-5)


@pytest.mark.slow
def test_two_cards_that_shard_a_guest_count_each_sample_once(user: Path, fake_cuda: FakeCuda) -> None:
    """The seventh step has three samples for one rank, and two for the other. Validation, test and ceiling follow.

    The worst weights are tested, so that they are not the last ones.
    """
    (user / "configs" / "workload" / "guest.yaml").write_text(YAML.format(model="Unclipped"))
    states, records = [], []
    for strategy in ("ddp", "fsdp"):
        cwd = user / strategy
        cwd.mkdir()
        asked = ("trainer.max_steps=9", "trainer.devices=2", f"trainer.strategy={strategy}", "gpu.precision=32-true")
        worst = ("trainer.best_metric=loss", "trainer.best_mode=max")
        own = ("+workload.data.num_train=101", "+workload.model.dropout=0")
        done = guest(user, *asked, *worst, *own, cwd=cwd, **fake_cuda.environment(cards=2))
        assert done.code == 0, done.text
        assert set(figures(only_folder(cwd, "guest"))["val/loss"]) == {7}
        states.append(content(only_folder(cwd, "guest"))["state_dict"])
        records.append(record_of(only_folder(cwd, "guest")))
        assert records[-1]["ceiling"]["samples_per_s"] > 0
    whole, shards = (record["metrics"] for record in records)
    for name in ("val/loss", "test/loss"):
        assert shards[name] == pytest.approx(whole[name], rel=1e-5)
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=0, atol=2e-6, msg=name)


@pytest.mark.slow
def test_a_guest_on_a_card(user: Path, fake_cuda: FakeCuda, tmp_path: Path) -> None:
    """Its checkpoint is evaluated on the CPU, too."""
    report = tmp_path / "report"
    cards = fake_cuda.environment(cards=1, mib=8192, slowdown=2, report=report)
    done = guest(user, "trainer.max_epochs=2", **cards)
    assert done.code == 0, done.text
    folder = only_folder(user, "guest")
    record = record_of(folder)
    assert (record["status"], record["plan"]["trainer.accelerator"]["value"]) == ("ok", "gpu")
    time = record["time"]
    assert 0 < time["phase_steps"] < record["throughput"]["steps"]
    assert all(time[f"device_{name}_ms"] > 0 for name in ("forward", "backward", "optimizer"))
    (process,) = [entry for line in report.read_text().splitlines() if (entry := json.loads(line))["contexts"]]
    assert process["violations"] == []
    done = evaluated(user, folder)
    assert done.code == 0, done.text
    assert float(done.out.split()[-1]) == pytest.approx(record["metrics"]["test/loss"], rel=1e-5)
