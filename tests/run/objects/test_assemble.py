"""Objects built from a configuration with unusual data or an unusual model."""

import time
from contextlib import closing
from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from tests.kit import sets
from tests.kit.few import slow
from tests.kit.machines import H200, LAPTOP
from tests.kit.own_loaders import Lists
from tests.plan.test_decide import config as make_config
from tests.plan.test_decide import planned
from wellfed import generators
from wellfed.config.compose import Composed
from wellfed.contract import Datasets, LossOutput
from wellfed.data.backends import thread_backend
from wellfed.data.own_loader import LoadedDatasets, OwnLoader
from wellfed.data.settings import LoaderSettings
from wellfed.errors import ConfigError, DataError
from wellfed.plan.run_plan import DataFacts
from wellfed.run.objects import assemble
from wellfed.run.objects.datasets import data_facts, with_derived, with_loader
from wellfed.run.objects.evaluation import eval_device_prefetch, eval_settings, make_eval_loader
from wellfed.run.objects.loaders import first_builder, look_at_first_batches, make_train_loader, one_off_settings
from wellfed.run.objects.models import model_facts
from wellfed.run.objects.optimizers import make_optimizer, make_schedule, try_schedule
from wellfed.run.objects.run_objects import RunObjects
from wellfed.run.planner import Planner

ADAM = {"_target_": "torch.optim.AdamW", "lr": 0.1}


class Model(nn.Module):
    def __init__(self, sparse=False):
        super().__init__()
        self.table, self.out = nn.Embedding(8, 4, sparse=sparse), nn.Linear(4, 1)

    def loss(self, batch):
        return LossOutput(self.out(self.table(batch["index"] % 8)).square().mean())


def datasets():
    return Datasets(train=sets.Fetching())


def config(optimizer=None, *, sparse=False, **groups):
    made = make_config(4, **groups)
    made.workload.optimizer = optimizer or ADAM
    made.workload.model = {"_target_": f"{__name__}.Model", "sparse": sparse}
    made.workload.data = {"_target_": f"{__name__}.datasets"}
    return made


# -- data that hangs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [sets.Breaking, slow(sets.BreakingItems)])
@pytest.mark.parametrize("option", ["auto", "balanced"])
def test_data_that_hangs_ends_each_look_within_the_timeout(kind, option, monkeypatch):
    monkeypatch.setattr(thread_backend, "_STOP_S", 0.01)
    more = {"num_workers": 1} if option == "auto" else {"prefetch_factor": 4}
    given = config(loader={"timeout_s": 1, **more})
    facts = DataFacts(sets.SIZE, has_fetch=kind is sets.Breaking)
    choices = {"loader": option}
    plan = planned(given, LAPTOP, data=facts, choices=choices)
    parts = RunObjects(Datasets(train=kind("hang", *range(sets.SIZE))), Model(), None)
    began_s = time.monotonic()
    first = first_builder(given, plan)
    assert first is not None
    assert look_at_first_batches(given, first, parts) is None
    with (
        closing(make_train_loader(given, one_off_settings(given, plan), parts.data)) as loader,
        pytest.raises(DataError, match=r"No batch came within loader\.timeout_s=1 s"),
    ):
        next(iter(loader))
    assert time.monotonic() - began_s < 20


# -- data that people bring --------------------------------------------------------------------------------------------


class Rows(Dataset):
    def __init__(self, samples=12):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return {"index": torch.tensor(index)}


class Sets(pl.LightningDataModule):
    def setup(self, stage=None):
        self.rows = Rows()

    def train_dataloader(self):
        return DataLoader(self.rows, 5, shuffle=True, drop_last=True)

    def test_dataloader(self):
        return DataLoader(self.rows, 3)


def loaders(kind="dict"):
    train, val = DataLoader(Rows(), 5), DataLoader(Rows(), 3)
    few = {"short": DataLoader(Rows(), 64, drop_last=True), "empty": DataLoader(Rows(0), 4)}
    given = {
        "dict": {"train": train, "val": val},
        **{name: (train, each) for name, each in few.items()},
        "tuple": (train, val),
        "one": train,
        "sets": (Rows(), None),
        "lists": DataLoader(Rows(), batch_sampler=Lists()),
        "listed": DataLoader(Rows(), batch_sampler=[[0, 1], [2, 3, 4]]),
    }
    odd = {"number": 3, "tensors": (torch.ones(2), torch.ones(2)), "odd": {"fit": train}}
    return {**given, **odd}[kind]


def brought(target, effective=None, model="Model", **arguments):
    made = config()
    made.workload.effective_batch_size = effective
    made.workload.model = {"_target_": f"{__name__}.{model}"}
    made.workload.data = {"_target_": f"{__name__}.{target}", **arguments} if target else None
    parts = assemble.make_objects(made)
    return parts, with_loader(made, parts.data)


@pytest.mark.parametrize(("kind", "has_val"), [("dict", True), ("tuple", True), ("one", False)])
def test_loaders_in_any_form_are_used_as_they_came(kind, has_val):
    parts, given = brought("loaders", kind=kind)
    assert (given.workload.effective_batch_size, given.workload.drop_last) == (5, False)
    assert (type(parts.data.train), parts.data.val is not None) == (Rows, has_val)
    own = data_facts(parts, given).own_loader
    assert (own.name, own.batch_size, own.typed) == ("DataLoader over Rows", 5, frozenset())
    assert own.values == {
        "num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "pin_memory": False, "timeout_s": 0,
    }  # fmt: skip
    loader = make_train_loader(given, LoaderSettings(), parts.data)
    assert isinstance(loader, OwnLoader)
    assert next(iter(loader)).batch["index"].tolist() == [0, 1, 2, 3, 4]


def test_what_is_typed_changes_the_dataloader():
    parts, given = brought("loaders", effective=4, kind="dict")
    given = replace(given, loader=replace(given.loader, num_workers=1, prefetch_factor=3))
    own = data_facts(parts, given).own_loader
    assert (own.values["num_workers"], own.values["prefetch_factor"]) == (1, 3)
    assert own.typed == {"num_workers", "prefetch_factor"}
    assert next(iter(make_train_loader(given, LoaderSettings(), parts.data))).batch["index"].tolist() == [0, 1, 2, 3]
    plan = planned(given, LAPTOP, data=data_facts(parts, given))
    assert plan.knobs["loader.num_workers"].because == "loader.num_workers=1"
    assert plan.knobs["loader.pin_memory"].because == "its DataLoader, as it came"
    (val,) = list(make_eval_loader(given, plan, parts.data, "val"))[:1]
    assert val.batch["index"].tolist() == [0, 1, 2]


class Stream(torch.utils.data.IterableDataset):
    """Rows in order; their length is not known."""

    def __iter__(self):
        return iter(map(Rows().__getitem__, range(12)))


def streams(kind="bare"):
    collate = torch.utils.data.default_collate
    return {
        "bare": Datasets(Stream(), val=Stream(), collate=collate),
        "loader": Datasets(DataLoader(Stream(), 4)),
    }[kind]


def test_a_stream_without_a_dataloader_is_put_into_one():
    with pytest.raises(ConfigError, match=r"effective_batch_size: is null, and there is no DataLoader"):
        brought("streams", kind="bare")
    parts, given = brought("streams", effective=5, kind="bare")
    assert isinstance(parts.data, LoadedDatasets)
    loader = make_train_loader(given, LoaderSettings(), parts.data)
    assert [len(one.batch["index"]) for one in loader] == [5, 5, 2]
    plan = planned(given, LAPTOP, data=data_facts(parts, given))
    assert (plan.loader.backend, plan.loader.num_workers, plan.loader.most_workers) == ("own", 0, 1)
    assert sum(one.size for one in make_eval_loader(given, plan, parts.data, "val")) == 12
    assert not data_facts(parts, given).own_loader.has_length
    parts, given = brought("streams", kind="loader")
    assert given.workload.effective_batch_size == 4


class OnDevice(Rows):
    """Data whose samples are prepared on the device."""

    def on_device(self, batch, rng):
        return batch


class Doubled(Subset):
    """A part of such data that prepares its own samples."""

    def on_device(self, batch, rng):
        return batch


def parts_of(kind):
    pair = torch.utils.data.random_split(OnDevice(), [0.5, 0.5])
    return Datasets(
        train=Rows(),
        val={
            "split": pair[0],
            "joined": ConcatDataset([Rows(), Subset(OnDevice(), [0, 1])]),
            "own": Doubled(Subset(OnDevice(), [0, 1]), [0]),
            "plain": Subset(Rows(), [0, 1]),
            "fetch": Subset(Subset(sets.Fetching(), [0, 1]), [0]),
        }[kind],
    )


@pytest.mark.parametrize(
    ("kind", "hidden"),
    [("split", "Subset"), ("joined", "ConcatDataset")],
)
def test_a_method_that_decides_what_is_learned_is_not_hidden(kind, hidden):
    with pytest.raises(ConfigError, match=f"val: {hidden} hides on_device of OnDevice.*Select the samples inside"):
        brought("parts_of", 4, kind=kind)


@pytest.mark.parametrize(
    ("kind", "hidden"), [("fetch", "Subset hides fetch of Fetching"), ("own", None), ("plain", None)]
)
def test_another_method_that_torchs_subset_hides_is_told(kind, hidden):
    parts, _ = brought("parts_of", 4, kind=kind)
    notes = [note for note in parts.data.notes if "hides" in note]
    assert [hidden in note for note in notes] == ([] if hidden is None else [True])


def test_a_data_module_gives_its_data():
    parts, given = brought("Sets", effective=4)
    assert given.workload.effective_batch_size == 4
    assert (len(parts.data.train), parts.data.val) == (12, None)
    assert [parts.guest.has(split) for split in ("train", "val", "test")] == [True, False, True]


@pytest.mark.parametrize("kind", ["number", "tensors", "odd"])
def test_what_is_no_data_is_told(kind):
    with pytest.raises(ConfigError, match=r"returned (int|tuple|dict), and a workload's data is a .*Return Datasets"):
        brought("loaders", kind=kind)


def test_without_a_loader_the_batch_size_must_be_set():
    with pytest.raises(ConfigError, match=r"workload\.effective_batch_size: is null, and there is no DataLoader"):
        brought("loaders", kind="sets")
    assert brought("loaders", kind="sets", effective=4)[1].workload.effective_batch_size == 4


def test_a_batch_sampler_without_a_size_is_planned_by_its_first_list_which_leaves_no_trace():
    parts, given = brought("loaders", kind="lists")
    before = generators.numbers()
    given = with_loader(replace(given, workload=replace(given.workload, effective_batch_size=None)), parts.data)
    assert (given.workload.effective_batch_size, generators.numbers()) == (6, before)
    because = planned(given, LAPTOP, data=data_facts(parts, given)).knobs["workload.effective_batch_size"].because
    assert "its batch sampler decides" in because
    with pytest.raises(ConfigError, match="of the DataLoader decides what a step is: 3 samples"):
        brought("loaders", effective=8, kind="listed")


# -- values that follow from the data ---------------------------------------------------------------------------------


def measured(width=None):
    derived = {
        "workload.data.width": (3, "all rows have it"),
        "workload.model.sparse": (True, "3 rows"),
        "workload.optimizer.lr": (0.5, "3 rows"),
    }
    return Datasets(train=sets.Fetching(), derived=derived)


@pytest.mark.parametrize(("lr", "width"), [(None, None), (0.1, 7)])
def test_the_data_fill_in_what_is_left_open_and_nothing_that_is_typed(lr, width):
    given = config({"_target_": "torch.optim.SGD", "lr": lr}, sparse=None)
    given.workload.data = {"_target_": f"{__name__}.measured", "width": width}
    planner = Planner.start(Composed(given, {}, {}, (), frozenset(), None, None, None), LAPTOP)
    assert planner.parts.model.table.sparse is True
    knobs = {knob: one for knob, one in planner.rough().to_dict().items() if one["source"] == "data"}
    found = planner.config.workload
    if lr is None:
        assert knobs["workload.data.width"] == {"value": 3, "because": "all rows have it", "source": "data"}
        assert list(knobs) == ["workload.data.width", "workload.model.sparse", "workload.optimizer.lr"]
        assert (found.data["width"], found.optimizer["lr"]) == (3, 0.5)
    else:
        assert list(knobs) == ["workload.model.sparse"]
        assert (found.data["width"], found.optimizer["lr"]) == (7, 0.1)


@pytest.mark.parametrize("knob", ["trainer.max_epochs", "workload.data", "workload.schedule.name"])
def test_only_entries_of_the_workload_follow_from_its_data(knob):
    data = Datasets(train=sets.Fetching(), derived={knob: (3, "all rows have it")})
    with pytest.raises(ConfigError, match=rf"Datasets.derived names {knob}, .* Name workload.data.<name>"):
        with_derived(config(), data)


# -- optimizers --------------------------------------------------------------------------------------------------------


def optimizer(model, given=None, **more):
    given = given or config()
    return make_optimizer(given, planned(given, LAPTOP), [{"params": list(model.parameters())}], **more)


def test_an_optimizer_is_fused_where_every_gradient_is_dense_and_real():
    assert optimizer(Model()).defaults["fused"] is True
    assert not optimizer(Model(), sparse=True).defaults["fused"]
    mixed = Model()
    mixed.wave = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    assert not optimizer(mixed).defaults["fused"]


@pytest.mark.parametrize("sparse", [True, False])
def test_sparse_gradients_are_known_from_the_model(sparse):
    parts = assemble.make_objects(config({"_target_": "torch.optim.SGD", "lr": 0.1}, sparse=sparse))
    assert parts.has_sparse_gradients is sparse


@pytest.mark.parametrize(
    ("target", "states"),
    [
        ("torch.optim.AdamW", 2),
        ("torch.optim.SGD", 0),
        ("torch.optim.SparseAdam", 2),  # refuses the dense gradient that it is tried with
    ],
)
def test_the_states_of_an_optimizer_are_counted_or_assumed(target, states):
    given = config({"_target_": target, "lr": 0.1})
    found = model_facts(assemble.make_objects(given), given)
    assert found.optimizer_state_bytes == states * found.trainable_bytes


@pytest.mark.parametrize(
    ("backend", "kind", "num_workers", "expected", "ahead"),
    [
        ("threads", sets.Fetching, 2, "threads", 3),
        ("processes", sets.Fetching, 2, "processes", 3),
        ("torch", sets.Global, 2, "torch", 3),
        # Samples of their own may draw from the process's generators, which no thread beside training may touch.
        ("threads", sets.Global, 2, "processes", 3),
        ("threads", sets.Global, 0, "inline", 0),
        ("own", sets.Global, 2, "inline", 0),  # these workers read the training DataLoader
        ("torch", sets.Fetching, 0, "inline", 3),
    ],
)
def test_an_evaluation_is_built_as_training_is(backend, kind, num_workers, expected, ahead):
    loader = {"num_workers": 2, "pin_memory": True, "device_prefetch": 3}
    config = make_config(loader=loader)
    plan = planned(config, H200)
    plan = replace(plan, loader=replace(plan.loader, backend=backend, num_workers=num_workers))
    found = eval_settings(config, plan, kind())
    workers = 0 if expected == "inline" else num_workers
    assert (found.backend, found.num_workers, found.pin_memory) == (expected, workers, True)
    assert eval_device_prefetch(plan, Datasets(kind(), kind()), "val") == ahead


# -- schedules ---------------------------------------------------------------------------------------------------------


def scheduled(**entries):
    given = config({"_target_": "torch.optim.SGD", "lr": 0.1})
    vars(given.workload.schedule).update(entries)
    return given


def test_a_scheduler_within_another_steps_the_same_optimizer():
    kinds = "torch.optim.lr_scheduler"
    given = scheduled(
        _target_=f"{kinds}.SequentialLR",
        milestones=[2],
        schedulers=[
            {"_target_": f"{kinds}.ConstantLR", "factor": 0.5, "total_iters": 9},
            {"_target_": f"{kinds}.StepLR", "step_size": 1},
        ],
    )
    sgd = torch.optim.SGD(Model().parameters(), lr=0.1)
    scheduler = make_schedule(given, sgd)
    rates = []
    for _ in range(4):
        rates.append(sgd.param_groups[0]["lr"])
        sgd.step()
        scheduler.step()
    assert rates == pytest.approx([0.05, 0.05, 0.1, 0.01])


def test_a_scheduler_that_refuses_its_arguments_is_told_before_training():
    given = scheduled(_target_="torch.optim.lr_scheduler.OneCycleLR", max_lr=0.1)
    with pytest.raises(ConfigError, match="workload.schedule: .*OneCycleLR refuses its arguments: You must define"):
        try_schedule(given, assemble.make_objects(given).model)
    try_schedule(config(), assemble.make_objects(config()).model)


@pytest.mark.parametrize(("kind", "samples"), [("short", 12), ("empty", 0)])
def test_a_split_of_which_no_batch_can_be_made_is_refused(kind, samples):
    parts, given = brought("loaders", kind=kind)
    with pytest.raises(DataError, match=rf"Rows makes no val batch of its {samples} samples\. Check workload\.data"):
        make_eval_loader(given, planned(given), parts.data, "val")
