"""Modules of Lightning with data are prepared once, as Lightning does it."""

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from wellfed.errors import ConfigError
from wellfed.train.lightning.user_module.data_module import (
    DataModuleCallback,
    datasets_of,
    tear_down,
    transfer_hooks,
    use_hooks,
)

ROWS = TensorDataset(torch.arange(8.0))


class Sets(pl.LightningDataModule):
    def __init__(self):
        super().__init__()
        self.calls = []

    def prepare_data(self):
        self.calls.append("prepare_data")

    def setup(self, stage=None):
        self.calls.append(f"setup {stage} of {self.trainer.world_size}")

    def train_dataloader(self):
        return DataLoader(ROWS, 2)

    def teardown(self, stage=None):
        self.calls.append(f"teardown {stage}")


class WithTest(Sets):
    def test_dataloader(self):
        return DataLoader(ROWS, 4)

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch


class Curious(Sets):
    def setup(self, stage=None):
        self.trainer.lightning_module  # noqa: B018


class WithoutSetup(pl.LightningDataModule):
    def train_dataloader(self):
        return self.rows


class Module(pl.LightningModule):
    calls: tuple[str, ...] = ()

    def setup(self, stage):
        self.calls = (*self.calls, stage)

    def train_dataloader(self):
        return DataLoader(ROWS, 2 * self.trainer.world_size)


def test_each_stage_is_set_up_once_and_only_where_there_is_a_loader():
    sets = Sets()
    found = datasets_of(sets)
    assert sets.calls == ["prepare_data", "setup fit of 1"]
    assert (found.train.batch_size, found.val, found.test, sets.trainer) == (2, None, None, None)
    with_test = WithTest()
    assert datasets_of(with_test).test.batch_size == 4
    assert with_test.calls == ["prepare_data", "setup fit of 1", "setup test of 1"]


@pytest.mark.parametrize(
    ("rank", "local_rank", "per_node", "prepares"),
    [(0, 0, True, True), (0, 0, False, True), (1, 1, True, False), (2, 0, True, True), (2, 0, False, False)],
)
def test_data_are_prepared_once_a_machine_or_once(monkeypatch, rank, local_rank, per_node, prepares):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    sets = Sets()
    sets.prepare_data_per_node = per_node
    datasets_of(sets)
    assert sets.calls == [*(["prepare_data"] if prepares else []), "setup fit of 1"]


def test_lightning_finds_nothing_left_to_do():
    sets = WithTest()
    datasets_of(sets)
    before = list(sets.calls)
    sets.prepare_data()
    for stage in ("fit", "validate", "test"):
        sets.setup(stage)
        sets.teardown(stage)
    assert sets.calls == before
    tear_down(sets)
    assert sets.calls == [*before, "teardown fit", "teardown test"]


def test_data_sets_need_no_class_of_their_own():
    found = datasets_of(pl.LightningDataModule.from_datasets(ROWS, ROWS, batch_size=4))
    assert (found.train.batch_size, found.val.batch_size, found.test) == (4, 4, None)


def test_a_module_with_loaders_is_set_up_once():
    module = Module()
    assert datasets_of(module).train.batch_size == 2
    module.setup("fit")
    module.setup("test")
    assert (module.calls, module._trainer) == (("fit", "test"), None)


def test_what_is_missing_is_told():
    with pytest.raises(ConfigError, match=r"LightningDataModule has no train_dataloader\. Give it"):
        datasets_of(pl.LightningDataModule())
    with pytest.raises(ConfigError, match=r"train_dataloader\(\) failed \(.*rows.*\), and it has no setup"):
        datasets_of(WithoutSetup())
    with pytest.raises(AttributeError, match=r"self\.trainer\.lightning_module is not known while data are set up"):
        datasets_of(Curious())


def test_its_hooks_become_the_modules():
    module, sets = pl.LightningModule(), WithTest()
    assert (transfer_hooks(Sets()), transfer_hooks(sets)) == ([], ["on_before_batch_transfer"])
    use_hooks(module, sets)
    assert module.on_before_batch_transfer == sets.on_before_batch_transfer
    assert "transfer_batch_to_device" not in vars(module)


def test_a_trainer_and_its_data_know_each_other():
    sets, trainer = Sets(), pl.Trainer(logger=False, enable_checkpointing=False)
    DataModuleCallback(sets).setup(trainer, pl.LightningModule(), "fit")
    assert (sets.trainer, trainer.datamodule) == (trainer, sets)
