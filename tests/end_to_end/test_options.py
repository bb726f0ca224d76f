"""Options that change how a run is done: each does what it says, and none changes what is learned."""

import json
from pathlib import Path

import pytest

from tests.end_to_end.commands import Done, only_folder, record_of, run, train, weights_of

QUICK = ("trainer.max_steps=4", "logger=none", "telemetry=none")


@pytest.mark.slow
def test_memory_options_learn_the_same(tmp_path: Path) -> None:
    seen = {}
    for memory in ("cache", "cache_host", "dynamic", "accumulate", "tight"):
        cwd = tmp_path / memory
        cwd.mkdir()
        done = train(f"memory={memory}", *QUICK, cwd=cwd)
        assert done.code == 0, done.text
        plan = record_of(only_folder(cwd))["plan"]
        seen[memory] = (
            plan["memory.features"]["value"],
            plan["memory.accumulate"]["value"],
            weights_of(only_folder(cwd)),
        )
    assert [features for features, _, _ in seen.values()] == ["cache", "cache_host", "dynamic", "cache", "cache"]
    # That of tight is measured, and so another on another machine.
    assert [accumulate for _, accumulate, _ in seen.values()][:4] == [1, 1, 1, 4]
    reference = seen["cache"][2]
    for memory, (_, _, state) in seen.items():
        worst = max(
            float((value - reference[name]).abs().max()) for name, value in state.items() if value.is_floating_point()
        )
        assert worst < 1e-4, memory


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "steps"), [("debug=one_step", 1), ("debug=limit", 10), ("debug=overfit", 100), ("debug=profiler", 60)]
)
def test_debug_options(tmp_path: Path, option: str, steps: int) -> None:
    done = train(option, "logger=none", "telemetry=none", "workload.effective_batch_size=512", cwd=tmp_path)
    assert done.code == 0, done.text
    folder = only_folder(tmp_path)
    record = record_of(folder)
    assert record["steps"] == steps
    if option == "debug=overfit":
        assert record["metrics"]["train/loss"] < 0.3  # from 0.69: two batches are learned by heart
    if option == "debug=profiler":
        assert json.loads((folder / "profile" / "trace.json").read_text())["traceEvents"]
        profile = record["profile"]
        assert (profile["steps"], profile["by"], record["artifacts"]["profile"]) == (10, "cpu", "profile/trace.json")
        assert (record["throughput"]["warmup_steps"], record["throughput"]["steps"]) == (14, 46)
        report = (folder / "report.md").read_text()
        assert "## Profile" in report
        assert "aten::mm" in report


MODULE = """
import torch
from torch import nn
from wellfed.contract import Datasets


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def loss(self, batch):
        from wellfed.contract import LossOutput

        return LossOutput((self.net(batch["x"]) - batch["y"]).square().mean())


class Data:
    def __init__(self, n):
        self.x = torch.randn(n, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "y": self.x[i].sum(0, keepdim=True)}


def data():
    return Datasets(Data(100), Data(20), Data(20))
"""
YAML = """
name: mine
effective_batch_size: 16
model:
  _target_: mine.{model}
data:
  _target_: mine.data
optimizer: {optimizer}
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A user's own config folder and module beside the project."""
    (tmp_path / "mine.py").write_text(MODULE)
    folder = tmp_path / "configs" / "workload"
    folder.mkdir(parents=True)
    (folder / "normed.yaml").write_text(YAML.format(model="Normed", optimizer="{_target_: torch.optim.SGD, lr: 0.1}"))
    (folder / "bare.yaml").write_text(YAML.format(model="Normed", optimizer="null"))
    return tmp_path


def own(mine: Path, workload: str, *arguments: str) -> Done:
    return run(
        "train.py",
        "--config-dir",
        str(mine / "configs"),
        f"workload={workload}",
        "trainer.max_epochs=2",
        "logger=none",
        "trainer.log_every_steps=3",
        *arguments,
        cwd=mine,
        PYTHONPATH=str(mine),
    )


@pytest.mark.slow
def test_batch_norm_is_never_split(mine: Path) -> None:
    done = own(mine, "normed", "memory.micro_batch=4")
    assert done.code == 2
    assert "BatchNorm" in done.err
    done = own(mine, "normed")
    assert done.code == 0, done.text


@pytest.mark.slow  # tests/run/objects/test_assemble.py
def test_a_plain_module_needs_an_optimizer(mine: Path) -> None:
    done = own(mine, "bare")
    assert done.code == 2
    assert "workload.optimizer" in done.err
    assert "Traceback" not in done.text


@pytest.mark.slow
def test_evaluate_gives_the_runs_test_figures(tmp_path: Path) -> None:
    awkward = tmp_path / "with blank (x)=y"
    assert train(*QUICK, f"paths.log_dir={awkward / 'logs'}", cwd=tmp_path).code == 0
    folder = only_folder(awkward)
    checkpoint = (folder / "checkpoints" / "best.ckpt").relative_to(tmp_path)
    done = run("evaluate.py", f"checkpoint={checkpoint}", cwd=tmp_path)
    assert done.code == 0, done.text
    written = json.loads((folder / "evaluation.json").read_text())["metrics"]
    expected = {name: value for name, value in record_of(folder)["metrics"].items() if name.startswith("test/")}
    assert written == pytest.approx(expected)
