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
from wellfed.run.planner import Planner, plan_without_running
from wellfed.train.memory.remembered_sizes import MICRO_BATCH, Lowered, remember


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


# -- what earlier runs had to lower ------------------------------------------------------------------------------------

SMALL = ("workload.data.scale=0.02", "workload.model.encoder_layers=1", "workload.model.encoder_dim=16", "logger=none")
TODAY = {MICRO_BATCH: Lowered(16, 64, "2026-11-22", "NAME")}


@pytest.fixture
def composed_of(tmp_path):
    """A run on the CPU, as for a card of 8 GB."""
    fixed = (*SMALL, "gpu=8gb", "workload.effective_batch_size=64", f"paths.cache_dir={tmp_path}")
    return lambda *words: compose([*fixed, *words])


@pytest.fixture
def plan_of(composed_of):
    """The plan of such a run."""
    return lambda *words: Planner.start(composed_of(*words), machine(torch_cuda())).for_training(0)


@pytest.fixture
def plans_of(composed_of, plan_of):
    """The same, and that of the command `plan` with these words."""
    return lambda *words: (plan_of(*words), plan_without_running(composed_of(*words)).plan)


def test_a_run_and_its_plan_begin_where_an_earlier_run_had_to_go(plan_of, plans_of):
    before, shown = plans_of()
    assert (before.memory.micro_batch, before.remembered) == (64, {})
    assert before.remembered_in is not None
    assert shown.remembered_in is not None
    for plan in (before, shown):  # that of a card which is not here is another
        remember(plan.remembered_in, MICRO_BATCH, TODAY[MICRO_BATCH])
    for plan, earlier in zip(plans_of(), (before, shown), strict=True):
        entry = plan.knobs["memory.micro_batch"]
        assert (entry.value, plan.memory.accumulate, entry.source) == (16, 4, "measured")
        assert entry.because.startswith("64 was predicted to fit, and ran out of memory on 2026-11-22 (run NAME); ")
        assert plan.predicted_peak_gib <= earlier.predicted_peak_gib


@pytest.mark.slow  # tests/plan/test_micro_batch.py has whose word is the last
def test_what_is_remembered_gives_way_to_what_is_typed(plan_of):
    remember(plan_of().remembered_in, MICRO_BATCH, TODAY[MICRO_BATCH])
    plan = plan_of("memory.remember=false")
    assert (plan.memory.micro_batch, plan.remembered, plan.remembered_in) == (64, {}, None)
    plan = plan_of("memory.micro_batch=32")
    assert (plan.memory.micro_batch, plan.knobs["memory.micro_batch"].source) == (32, "set")


@pytest.mark.slow
def test_another_plan_has_a_file_of_its_own(plan_of):
    own = plan_of().remembered_in
    assert own == plan_of("memory.micro_batch=32", "seed=7", "trainer.max_steps=3").remembered_in
    others = [
        *("gpu.memory_gib=6", "gpu.precision=bf16-mixed", "memory.features=dynamic", "gpu.allocator=expandable"),
        *("workload.effective_batch_size=32", "workload.optimizer._target_=torch.optim.SGD", "workload.model.dim=32"),
    ]
    files = {own, *(plan_of(words).remembered_in for words in others)}
    assert len(files) == 1 + len(others)


@pytest.mark.slow
def test_a_damaged_file_is_told_once_and_planned_as_if_it_were_not_there(plan_of):
    file = plan_of().remembered_in
    file.parent.mkdir(parents=True)
    file.write_text("{")
    plan = plan_of()
    assert (plan.memory.micro_batch, plan.remembered_in) == (64, file)
    (warning,) = [each for each in plan.warnings if str(file) in each]
    assert warning.endswith(
        "is no file of sizes that had to be lowered; planned as if it were not there. Delete it, or set "
        "memory.remember=false."
    )


@pytest.mark.simulated
def test_what_is_remembered_is_not_measured_again(plan_of):
    plan = plan_of()
    assert "; a step of 64 alone took " in plan.knobs["memory.micro_batch"].because
    remember(plan.remembered_in, MICRO_BATCH, TODAY[MICRO_BATCH])
    again = plan_of().knobs["memory.micro_batch"]
    assert again.value == 16
    assert "alone took" not in again.because


@pytest.mark.slow
def test_without_a_budget_nothing_is_kept(plans_of):
    run, shown = plans_of("gpu=cpu")
    assert (run.remembered_in, shown.remembered_in) == (None, None)


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
