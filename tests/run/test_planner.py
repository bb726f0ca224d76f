"""Where a run, a plan, a fit and an evaluation begin."""

import dataclasses

import numpy as np
import pytest
import torch

from tests.kit.few import few
from tests.kit.machines import LAPTOP
from wellfed.config.compose import compose
from wellfed.config.schema import Accelerator
from wellfed.contract import Datasets
from wellfed.errors import ConfigError, DataError
from wellfed.observe.hardware.detect import machine
from wellfed.observe.hardware.torch_cuda import torch_cuda
from wellfed.run.objects import assemble
from wellfed.run.objects.run_objects import RunObjects
from wellfed.run.planner import Planner


def test_what_the_machine_and_the_imports_refuse_is_told_at_once_before_data_is_read(monkeypatch, tmp_path):
    (tmp_path / "my_importing.py").write_text("import no_such_package_at_all\n\nf = no_such_package_at_all.f\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(assemble, "make_objects", lambda config: pytest.fail("the data was read"))
    made = compose(["logger=none", "config.allow_targets=[torch,workloads,my_importing]"])
    trainer = dataclasses.replace(made.config.trainer, accelerator=Accelerator.gpu)
    workload = dataclasses.replace(made.config.workload, data={"_target_": "my_importing.f"})
    config = dataclasses.replace(made.config, trainer=trainer, workload=workload)
    with pytest.raises(ConfigError) as raised:
        Planner.start(dataclasses.replace(made, config=config), LAPTOP)
    machine, imported = raised.value.faults
    assert machine.where == "trainer.accelerator"
    assert imported.problem == "needs the package no_such_package_at_all, which is not installed."


# -- batches that can't be cut -----------------------------------------------------------------------------------------


class Rows:
    """Four numbers a sample, drawn from a generator of its own, and one number for the whole batch."""

    def __init__(self):
        self.own = np.random.default_rng(1)

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.from_numpy(self.own.random(4)).float()

    @staticmethod
    def collate(samples):
        return {"x": torch.stack(samples), "max_len": 17}


class SplitRows(Rows):
    def split(self, batch, sizes):
        return [{**batch, "x": x} for x in batch["x"].split(sizes)]


class Breaking(Rows):
    def __getitem__(self, index):
        raise RuntimeError("no sample")


class LossOf(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def loss(self, batch):
        return self.net(batch["x"]).mean()


def planner_on(train, *words):
    made = compose(["logger=none", "gpu=cpu", "workload.effective_batch_size=8", *words])
    parts = RunObjects(Datasets(train, collate=Rows.collate), LossOf(), None)
    return Planner.start(made, machine(torch_cuda()), parts)


@pytest.mark.parametrize("loader", ["baseline", "conservative"])
@pytest.mark.parametrize("words", [("memory.micro_batch=4", "memory.on_oom=fail"), ()], ids=["cut", "may be cut"])
def test_a_batch_that_cannot_be_cut_is_refused_before_training(loader, words):
    planner = planner_on(Rows(), f"loader={loader}", *words)
    with pytest.raises(DataError, match=r"batch\['max_len'\] can't be cut into micro-batches: it is 17"):
        planner.for_training(0)


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (Rows(), ("memory.micro_batch=8", "memory.on_oom=fail")),
        (SplitRows(), ("memory.micro_batch=4",)),
        (Breaking(), ("memory.micro_batch=4",)),  # training meets it, and says more
    ],
    ids=["never cut", "own split", "no batch"],
)
@pytest.mark.parametrize("loader", few(["conservative", "baseline"], 1))
def test_a_batch_that_need_not_be_cut_or_cannot_be_built_is_not_refused(loader, train, words):
    before = train.own.bit_generator.state
    planner_on(train, f"loader={loader}", *words).for_training(0)
    assert train.own.bit_generator.state == before


def test_the_look_at_a_batch_draws_from_no_generator_of_the_dataset():
    train = Rows()
    before = train.own.bit_generator.state
    with pytest.raises(DataError):
        planner_on(train, "loader=baseline", "memory.micro_batch=4").for_training(0)
    assert train.own.bit_generator.state == before
