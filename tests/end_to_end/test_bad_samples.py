"""A training sample that can't be loaded, as the user of the command meets it."""

from pathlib import Path

import pytest

from tests.end_to_end.commands import Done, only_folder, record_of, run

DATA = """
import torch
from torch import nn

from wellfed.contract import Datasets, LossOutput


class Points:
    def __init__(self, bad):
        self.bad = bad

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index in self.bad:
            raise OSError(f"image {index} is truncated")
        return {"x": torch.tensor([float(index)]) / 64, "index": index}


def datasets(bad):
    return Datasets(train=Points(bad))


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
        "workload=points",
        "trainer.max_epochs=2",
        "trainer.checkpoint_every_steps=3",
        "logger=none",
        "telemetry=none",
        *arguments,
        cwd=cwd,
        PYTHONPATH=str(cwd),
    )


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
    # With other skip_ids the epoch begins anew.
    again = (first["steps"], first["samples"]) if "skip_ids" in way_out else (0, 0)
    assert (record["steps"], record["samples"]) == (8 + again[0], 2 * 62 + again[1])  # the others once an epoch
    told = [event["index"] for event in record["events"] if event["kind"] == "sample_skipped"]
    assert len(told) == 1 + ("max_skipped" in way_out)  # the first before, the second now
