"""What Hydra offers to a job is the same in a run here as in a program of ``@hydra.main``."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.commands import ROOT, Done, record_of, run

PARTS = '''
import json, os
from pathlib import Path
import hydra.utils, torch
from hydra.core.hydra_config import HydraConfig
from torch import nn
from torch.utils.data import TensorDataset
from wellfed import LossOutput


def seen():
    """What user code sees of Hydra, without what differs by design."""
    own = HydraConfig.get()
    here = Path.cwd()
    return {
        "job": own.job.name, "config": own.job.config_name, "cwd": own.runtime.cwd, "mode": own.mode.name,
        "choice": own.runtime.choices.workload, "overrides": list(own.overrides.task),
        "original": hydra.utils.get_original_cwd(), "absolute": hydra.utils.to_absolute_path("x"),
        "num": None if "num" not in own.job or own.mode.name == "RUN" else own.job.num,
        "is_in_folder": here.resolve() == Path(own.runtime.output_dir).resolve(), "env": os.environ.get("PLANTED"),
    }


def datasets(note, num_splits=3, **by_yaml):
    folder = Path(HydraConfig.get().runtime.output_dir)
    found = {"seen": seen(), "note": note, "yaml": by_yaml | {"is_folder": Path(by_yaml.pop("out")) == folder}}
    (folder / "seen.json").write_text(json.dumps(found))
    Path("relative.txt").write_text("x")
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return tuple(TensorDataset(x, x.sum(1)) for _ in range(num_splits))


class Net(nn.Module):
    def __init__(self, width=4, out=None):
        super().__init__()
        assert Path(out) == Path(HydraConfig.get().runtime.output_dir)
        self.layer = nn.Linear(width, 1)

    def loss(self, batch):
        assert seen()
        return LossOutput((self.layer(batch[0]).squeeze(-1) - batch[1]).square().mean())
'''
WORKLOAD = """
name: probed
effective_batch_size: 16
model: {_target_: probed.Net, out: "${paths.output_dir}"}
data:
  _target_: probed.datasets
  note: plain
  out: ${hydra:runtime.output_dir}
  name: ${hydra:job.name}
  cwd: ${hydra:runtime.cwd}
  choice: ${hydra:runtime.choices.workload}
optimizer: {_target_: torch.optim.SGD, lr: 0.01}
"""
NOTED = """
# @package _global_
workload: {data: {note: mine}}
"""
CONTROL = """
import hydra, sys
sys.path.insert(0, "src")
from wellfed.config.hydra_session import register_schemas
register_schemas()

@hydra.main(version_base="1.3", config_path="../configs", config_name="train")
def main(cfg):
    hydra.utils.instantiate(cfg.workload.data, _convert_="all")

main()
"""
QUICK = ("workload=probed", "trainer.max_steps=3", "logger=none", "telemetry=none", "trainer.accelerator=cpu")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    shutil.copytree(ROOT / "configs", folder / "configs")
    for place in ("src", "control", "more/experiment"):
        (folder / place).mkdir(parents=True)
    for name in ("train", "evaluate"):
        shutil.copy(ROOT / "src" / f"{name}.py", folder / "src")
    (folder / "src" / "probed.py").write_text(PARTS)
    (folder / "control" / "train.py").write_text(CONTROL)
    (folder / "configs" / "workload" / "probed.yaml").write_text(WORKLOAD)
    (folder / "more" / "experiment" / "noted.yaml").write_text(NOTED)
    return folder


def go(project: Path, script: str, *words: str, **more: str) -> Done:
    done = run(project / script, *words, cwd=project, fresh=True, **more)
    assert done.code == 0, done.text
    return done


def found(folder: Path) -> Mapping[str, Any]:
    return dict(json.loads((folder / "seen.json").read_text()))


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("hydra.job.chdir=true", "+hydra.job.env_set.PLANTED=yes")], ids=str)
def test_a_run_sees_what_a_job_of_hydra_sees(project: Path, words: tuple[str, ...]) -> None:
    here, alone = project / "here", project / "alone"
    go(project, "src/train.py", *QUICK, *words, f"hydra.run.dir={here}")
    go(project, "control/train.py", *QUICK, *words, f"hydra.run.dir={alone}")
    assert found(here) == found(alone)
    assert found(here)["seen"]["is_in_folder"] is bool(words)
    assert found(here)["yaml"]["is_folder"]
    assert (here / "relative.txt").exists() is (alone / "relative.txt").exists() is bool(words)
    (here / "seen.json").unlink()
    go(project, "src/evaluate.py", f"checkpoint={here}", "accelerator=cpu")
    assert found(here)["seen"]["is_in_folder"] is bool(words)
    go(project, "src/train.py", f"rerun={here}", "hydra.run.dir=again")
    assert found(project / "again")["seen"]["is_in_folder"] is bool(words)
    go(project, "src/train.py", f"resume={here}", "trainer.max_steps=5")
    assert record_of(here)["steps"] == 5


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("hydra.job.chdir=true",)], ids=str)
def test_each_trial_sees_its_own_folder(project: Path, words: tuple[str, ...]) -> None:
    axis = ("workload.optimizer.lr=0.1,0.2", "+workload.data.num=${hydra:job.num}", *words)
    go(project, "src/train.py", "-m", *QUICK, *axis, "hydra.sweep.dir=here")
    go(project, "control/train.py", "-m", *QUICK, *axis, "hydra.sweep.dir=alone", "hydra/sweeper=basic")
    trials = sorted(path.parent for path in (project / "here").glob("*/seen.json"))
    assert len(trials) == 2
    alone = [found(project / "alone" / name) for name in "01"]
    for each in sorted(map(found, trials), key=lambda one: one["seen"]["num"]):
        beside = alone.pop(0)
        each["seen"]["overrides"].sort()
        beside["seen"]["overrides"].sort()
        assert each == beside


@pytest.mark.slow
def test_trainings_that_nothing_ranks_are_run_as_hydra_runs_them(project: Path) -> None:
    words = ("workload.optimizer.lr=0.1,0.2", "+workload.data.num_splits=1", "hydra.sweep.dir=here")
    done = go(project, "src/train.py", "-m", *QUICK, *words)
    assert "has no validation split: there is no metric to rank trainings by. They are run without." in done.err
    assert [found(project / "here" / name)["seen"]["num"] for name in "01"] == [0, 1]


@pytest.mark.slow
def test_folders_of_configurations_need_not_be_typed_again(project: Path, tmp_path: Path) -> None:
    shutil.copy(project / "configs" / "train.yaml", project / "configs" / "other.yaml")
    searched = f"hydra.searchpath=[file://{project / 'more'}]"
    typed = {"dir": ["--config-dir", "more"], "path": [searched, "--config-name=other"]}
    for name, words in typed.items():
        folder = project / name
        go(project, "src/train.py", *words, *QUICK, "experiment=noted", f"hydra.run.dir={folder}")
        assert found(folder)["note"] == "mine"
        (folder / "seen.json").unlink()
        go(project, "src/evaluate.py", f"checkpoint={folder}", "accelerator=cpu")
        assert found(folder)["note"] == "mine"
        (folder / "seen.json").unlink()
        go(project, "src/train.py", f"resume={folder}", "trainer.max_steps=5")
        assert found(folder)["note"] == "mine"
        go(project, "src/train.py", f"rerun={folder}", f"hydra.run.dir={folder}_again")
        assert found(project / f"{name}_again")["note"] == "mine"
    (project / "more").rename(project / "moved")
    for words in (["src/train.py", f"rerun={project / 'dir'}"], ["src/evaluate.py", f"checkpoint={project / 'dir'}"]):
        done = run(project / words[0], words[1], cwd=project, fresh=True)
        assert done.code == 2
        assert "more: is no folder." in done.text
    go(project, "src/train.py", "--config-dir=moved", f"rerun={project / 'dir'}", "hydra.run.dir=last")
