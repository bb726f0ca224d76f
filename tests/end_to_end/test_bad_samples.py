"""A training sample that can't be loaded, as the user of the command meets it."""

from pathlib import Path

import pytest

from tests.end_to_end.commands import Done, only_folder, record_of, run

DATA = """
import os
import signal
import time

import torch
from torch import nn

from wellfed.contract import Datasets, LossOutput


class Points:
    def __init__(self, bad, how):
        self.bad, self.how = bad, how

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index in self.bad:
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            while self.how == "hang":
                time.sleep(0.01)
            raise OSError(f"image {index} is truncated")
        return {"x": torch.tensor([float(index)]) / 64, "index": index}


class Fetching(Points):
    def fetch(self, indices, rng):
        for index in indices.tolist():
            self[index]
        return {"x": indices[:, None] / 64, "index": indices}


def datasets(bad, how="raise", fetch=False):
    return Datasets(train=(Fetching if fetch else Points)(bad, how))


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(1, 1)

    def loss(self, batch):
        return LossOutput(self.line(batch["x"]).square().mean())
"""


def train(cwd: Path, *arguments: str) -> Done:
    """A run of two epochs of four steps."""
    (cwd / "points.py").write_text(DATA)
    workload = (
        "name: points\neffective_batch_size: 16\nmodel: {_target_: points.Line}\n"
        "data: {_target_: points.datasets, bad: [5, 40]}\noptimizer: {_target_: torch.optim.SGD, lr: 0.1}\n"
    )
    (cwd / "conf" / "workload").mkdir(parents=True, exist_ok=True)
    (cwd / "conf" / "workload" / "points.yaml").write_text(workload)
    return run(
        "train.py",
        "--config-dir",
        str(cwd / "conf"),
        "config.allow_targets=[points,torch]",
        "workload=points",
        "trainer.max_epochs=2",
        "trainer.checkpoint_every_steps=3",
        "logger=none",
        "telemetry=none",
        *arguments,
        cwd=cwd,
        PYTHONPATH=str(cwd),
    )


@pytest.mark.slow  # tests/data/backends/test_bad_samples.py
def test_bad_samples_are_left_out_warned_of_and_in_the_record(tmp_path: Path) -> None:
    done = train(tmp_path, "loader.max_skipped=2", "loader.backend=inline")
    assert done.code == 0, done.text
    record = record_of(only_folder(tmp_path, "points"))
    assert (record["status"], record["steps"], record["samples"]) == ("ok", 8, 2 * 62)
    events = [event for event in record["events"] if event["kind"] == "sample_skipped"]
    assert sorted(event["index"] for event in events) == [5, 40]  # once, though there are two epochs
    assert all(event["epoch"] == 0 and event["reason"] for event in events)
    for index in (5, 40):
        assert done.err.count(f"training sample {index} is left out") == 1, done.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said", "kind"),
    [
        (
            ("loader.backend=processes", "loader.num_workers=1", "+workload.data.how=kill"),
            "A loader worker process was killed by SIGKILL. It was asked for training batch ",
            "worker",
        ),
        (
            ("loader.backend=threads", "loader.num_workers=1", "+workload.data.fetch=true", "+workload.data.how=hang"),
            "No batch came within loader.timeout_s=3 s: a worker is stuck or too slow. It was asked for training ",
            "data",
        ),
    ],
    ids=["kill", "hang"],
)
def test_a_worker_that_dies_or_hangs_ends_the_run_with_what_it_was_asked_for(
    tmp_path: Path, arguments: tuple[str, ...], said: str, kind: str
) -> None:
    done = train(tmp_path, "loader.timeout_s=3", "workload.data.bad=[40]", *arguments)
    assert done.code == 1
    assert "Traceback" not in done.err
    assert said in done.err
    record = record_of(only_folder(tmp_path, "points"))
    assert (record["status"], record["error"]["kind"]) == ("failed", kind)
    log = (only_folder(tmp_path, "points") / "train.log").read_text()
    (line,) = [text for text in log.splitlines() if "was to be made of the samples" in text and " 40" in text]
    assert line.count(",") >= 15  # all indices of the batch


@pytest.mark.slow
def test_without_max_skipped_the_run_ends_naming_the_sample(tmp_path: Path) -> None:
    done = train(tmp_path, "loader.backend=processes", "loader.num_workers=1")
    assert done.code != 0
    assert "Traceback" not in done.err
    assert "Points: training sample " in done.err
    assert " is truncated (points.py:" in done.err
    assert "loader.max_skipped=1 leaves out what fails." in done.err


@pytest.mark.slow
@pytest.mark.parametrize("way_out", ["loader.max_skipped=2", "loader.skip_ids=[5,40]"])
def test_one_more_than_allowed_is_an_error_and_resumed_as_it_says_the_run_goes_on(tmp_path: Path, way_out: str) -> None:
    done = train(tmp_path, "loader.max_skipped=1", "trainer.checkpoint_every_steps=1", "loader.backend=inline")
    assert done.code == 1
    assert "2 training samples could not be loaded, and loader.max_skipped=1 allows no more" in done.err
    folder = only_folder(tmp_path, "points")
    first = record_of(folder)
    assert (first["status"], first["error"]["kind"]) == ("failed", "data")
    done = train(tmp_path, f"resume={folder}", way_out, "loader.backend=inline")
    assert done.code == 0, done.text
    record = record_of(folder)
    assert (record["steps"], record["samples"]) == (8, 2 * 62)  # each of the others once an epoch
    told = [event["index"] for event in record["events"] if event["kind"] == "sample_skipped"]
    assert len(told) == 1 + ("max_skipped" in way_out)  # the first before, the second now


@pytest.mark.slow  # tests/plan/test_decide.py
def test_devices_and_skipping_is_refused(tmp_path: Path) -> None:
    done = train(tmp_path, "loader.max_skipped=1", "trainer.devices=2")
    assert done.code == 2
    assert "loader.max_skipped: 1 with trainer.devices=2: a rank does not know" in done.err
