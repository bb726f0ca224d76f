"""What foreign code does while it is rehearsed, seen from ``plan``, ``fit`` and a run."""

import json
import random
import shutil
import sys

import numpy as np
import pytest
import torch
import yaml

from tests.end_to_end.commands import ROOT
from tests.kit.few import slow
from wellfed.cli.commands import fit, plan
from wellfed.config.compose import compose
from wellfed.errors import ConfigError, DataError
from wellfed.run.planner import plan_without_running

MODULE = """
import random
import sys

import numpy as np
import torch
from torch import nn
from wellfed.contract import Datasets, Features, LossOutput

print("imported")


class Net(nn.Module):
    def __init__(self, does="nothing"):
        super().__init__()
        print("made")
        self.does = does
        self.net = nn.LazyLinear(1) if does == "lazy" else nn.Linear(8, 1)

    def loss(self, batch):
        if self.does == "print":
            print("forward")
        if self.does == "draw":
            random.random(), np.random.rand()
        return LossOutput(self.net(batch["x"]).square().mean())


class Rows:
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return {"x": torch.full((8,), float(index))}


class Texts(Rows):
    def __init__(self, late):
        super().__init__(64)
        self.late = late

    def __getitem__(self, index):
        return torch.ones(5000 if self.late in (index, "all") else 5, 8)


def padded(samples):
    return {"x": nn.utils.rnn.pad_sequence(samples, batch_first=True)}


def datasets(n=64):
    return Datasets(Rows(n))


def texts(late):
    return Datasets(Texts(late), collate=padded)


class Windows:
    # Of a series; a batch carries their rows where nothing is held on the device.

    def __init__(self, mode="dynamic"):
        self.mode, self.series = mode, torch.randn(1_000_000)

    def __len__(self):
        return 64

    def for_features(self, mode):
        return Windows(mode)

    def prepared(self):
        if type(torch.zeros(3)) is not torch.Tensor:  # what makes it of a user's files could do nothing with that
            open(__file__ + ".faked", "w").close()
        return self.series

    def rows(self, indices):
        return cut(self.series, indices)

    def fetch(self, indices, rng):
        batch = {"index": indices}
        return batch if self.mode == "cache" else batch | {"x": self.rows(indices)}

    def __getitem__(self, index):
        return {name: value[0] for name, value in self.fetch(torch.tensor([index]), None).items()}

    def on_device(self, batch, rng, features):
        return batch if "x" in batch else batch | {"x": features.rows(batch["index"])}


def cut(store, indices):
    return store.as_strided((len(store) - 7, 8), (1, 1)).index_select(0, indices)


def windows():
    train = Windows()
    size = train.series.nbytes
    return Datasets(train, features=Features(64, size, train.rows, store=train.prepared, cut=cut))

"""
WORKLOAD = {
    "name": "rows",
    "effective_batch_size": 16,
    "model": {"_target_": "theirs.Net"},
    "data": {"_target_": "theirs.datasets"},
    "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.01},
}


@pytest.fixture
def typed(tmp_path, monkeypatch):
    """A project with one workload, and what is typed for it."""
    configs = shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (configs / "workload" / "rows.yaml").write_text(yaml.safe_dump(WORKLOAD))
    (tmp_path / "theirs.py").write_text(MODULE)
    monkeypatch.setenv("WELLFED_PROJECT", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    yield ["workload=rows", "gpu=8gb", f"paths.cache_dir={tmp_path / 'cache'}"]
    sys.modules.pop("theirs", None)


def planned(typed, capsys, *words):
    assert plan.main([*typed, *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "does",
    ["print", *map(slow, ("nothing", "draw"))],  # planned below
)
def test_json_is_alone_on_stdout_and_the_peak_is_predicted(typed, capsys, does):
    found = planned(typed, capsys, f"+workload.model.does={does}")
    assert found["fits"] is True
    assert found["predicted_peak_gib"] > 0


@pytest.mark.slow
def test_nothing_is_drawn_from_pythons_and_numpys_generators(typed):
    plan_without_running(compose(typed))  # imports, which may draw
    drawn = []
    for more in ([], ["+workload.model.does=draw"]):
        plan_without_running(compose([*typed, *more]))
        drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert drawn[0] == drawn[1]


def test_a_model_without_sizes_is_refused(typed):
    with pytest.raises(ConfigError, match=r"without a shape until the first batch \(Lazy\*\): net\.weight\. Give"):
        plan_without_running(compose([*typed, "+workload.model.does=lazy"]))


@pytest.mark.slow
def test_a_later_longer_batch_is_planned_for(typed, capsys):
    def told(late):
        # In order, and 64 samples: limits count the run's batches, not those of the look.
        words = ["trainer.overfit_batches=4", "workload.data._target_=theirs.texts", f"+workload.data.late={late}"]
        found = planned(typed, capsys, *words)
        return found["parts"]

    short, all_long, once_long = told("none"), told("all"), told(60)
    assert once_long == all_long
    assert once_long["activations"] > 100 * short["activations"]


@pytest.mark.parametrize("samples", [0, pytest.param(5, marks=pytest.mark.slow)])
def test_too_little_data_is_told_in_the_users_sizes(typed, capsys, samples):
    little = [f"+workload.data.n={samples}", "workload.drop_last=true"]
    found = planned(typed, capsys, *little)
    assert (found["fits"], found["predicted_peak_gib"]) == (None, None)
    assert ".." not in "".join(found["warnings"])
    told = rf"{samples} training samples make no step of workload\.effective_batch_size=16|has no training samples"
    with pytest.raises(DataError, match=told) as refused:
        fit.main([*typed, *little])
    assert ".." not in str(refused.value)


def test_what_fit_prints_can_be_typed(typed, capsys):
    split = ["memory.micro_batch=4", "memory.accumulate=4"]
    assert fit.main([*typed, *split, "+workload.model.does=print"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("Use it:"))
    assert line.endswith("+workload.model.does=print memory.micro_batch=16")
    assert "accumulate" not in line


@pytest.mark.slow
def test_a_store_counts_where_it_is_held_on_the_device_alone(typed, tmp_path, capsys):
    typed.append("workload.data._target_=theirs.windows")
    parts = {mode: planned(typed, capsys, f"memory={mode}")["parts"] for mode in ("cache", "cache_host", "dynamic")}
    tables = {mode: sizes["feature table"] for mode, sizes in parts.items()}
    assert tables == {"cache": pytest.approx(4e6), "cache_host": 0, "dynamic": 0}
    assert max(sizes["activations"] for sizes in parts.values()) < 1e5  # the store is none, and views of it neither
    assert not (tmp_path / "theirs.py.faked").exists()
