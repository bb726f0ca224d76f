"""A DataLoader made again has what was typed, and all else as it came."""

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from wellfed.config.schema import Backend, LoaderConfig, RunConfig, WorkloadConfig
from wellfed.data.remade_loader import remade, typed_changes
from wellfed.errors import ConfigError

DATA = TensorDataset(torch.arange(10))
KEPT = (
    "dataset", "sampler", "collate_fn", "worker_init_fn", "generator", "multiprocessing_context", "pin_memory_device",
    "in_order",
)  # fmt: skip


class OwnArguments(DataLoader[Any]):
    """Its constructor takes no argument of a DataLoader, as those of other libraries."""

    def __init__(self, rows: Any) -> None:
        super().__init__(rows, batch_size=4, collate_fn=list)
        self.mark = object()


class OwnIter(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(10))


def worker_init(number: int) -> None:
    """Does nothing."""


def given(**more: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    return DataLoader(
        DATA, **{"batch_size": 4, "shuffle": True, "generator": generator, "worker_init_fn": worker_init, **more}
    )


CHANGED = [
    ({}, {"num_workers": 3}, {"num_workers": 3, "prefetch_factor": 2}),
    ({"num_workers": 2, "persistent_workers": True, "timeout": 5}, {"num_workers": 0},
     {"num_workers": 0, "persistent_workers": False, "prefetch_factor": None, "timeout": 0}),
    ({"num_workers": 2}, {"prefetch_factor": 8, "persistent_workers": True, "pin_memory": True, "timeout": 9},
     {"num_workers": 2, "prefetch_factor": 8, "persistent_workers": True, "pin_memory": True, "timeout": 9}),
    ({}, {"prefetch_factor": 4, "timeout": 60}, {"num_workers": 0, "prefetch_factor": None, "timeout": 0}),
    ({}, {"batch_size": 3, "drop_last": True}, {"batch_size": 3, "drop_last": True}),
    ({"num_workers": 1, "multiprocessing_context": "spawn", "in_order": False}, {"num_workers": 2}, {"num_workers": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("own", "changes", "expected"), CHANGED)
def test_only_what_was_typed_differs(own: dict[str, Any], changes: dict[str, Any], expected: dict[str, Any]) -> None:
    loader = given(**own)
    made = remade(loader, changes)
    assert made is not loader
    assert {name: getattr(made, name) for name in expected} == expected
    assert all(getattr(made, name) is getattr(loader, name) for name in KEPT)
    assert all(getattr(loader, name) == value for name, value in own.items() if name != "multiprocessing_context")
    if "batch_size" not in changes:
        assert made.batch_sampler is loader.batch_sampler


def test_its_batches_are_those_of_a_dataloader_with_these_arguments() -> None:
    made = remade(given(), {"batch_size": 3, "drop_last": True})
    expected = given(batch_size=3, drop_last=True)
    assert [batch[0].tolist() for _ in range(2) for batch in made] == [
        batch[0].tolist() for _ in range(2) for batch in expected
    ]
    streamed = remade(DataLoader(Stream(), batch_size=4), {"batch_size": 5})
    assert [batch.tolist() for batch in streamed] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    own = OwnArguments(DATA)
    made = remade(own, {"batch_size": 5})
    assert (type(made), made.mark, [len(batch) for batch in made]) == (OwnArguments, own.mark, [5, 5])


LEFT = [
    (given(), {}),
    (given(num_workers=2), {"num_workers": 2, "batch_size": 4}),
    (DataLoader(DATA, batch_size=None), {"batch_size": 4}),
    (DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 4, False)), {"batch_size": 4}),
    (OwnIter(DATA, batch_size=4), {"batch_size": 4}),
    ([torch.zeros(4)], {"batch_size": 4}),
]


@pytest.mark.parametrize(("loader", "changes"), LEFT)
def test_a_loader_without_a_change_is_itself(loader: Any, changes: dict[str, Any]) -> None:
    assert remade(loader, changes) is loader


REFUSED = [
    (OwnIter(DATA), {"num_workers": 2}, "loader.num_workers=2", "OwnIter has an __iter__ of its own"),
    ([torch.zeros(4)], {"pin_memory": True}, "loader.pin_memory=true", "list is no torch.utils.data.DataLoader"),
    (DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 4, False)), {"batch_size": 8},
     "workload.effective_batch_size=8", "its BatchSampler decides the samples of a step (batch_size=4)"),
    (DataLoader(DATA, batch_sampler=[[0, 1], [2]]), {"drop_last": True},
     "workload.drop_last=true", "its list decides the samples of a step"),
    (DataLoader(DATA, batch_size=None), {"drop_last": True},
     "workload.drop_last=true", "TensorDataset makes the batches"),
]  # fmt: skip


@pytest.mark.parametrize(("loader", "changes", "where", "why"), REFUSED)
def test_what_can_not_be_changed_is_refused_with_the_way_out(
    loader: Any, changes: dict[str, Any], where: str, why: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        remade(loader, changes)
    (fault,) = caught.value.faults
    assert fault.where == where
    assert why in fault.problem
    assert "Datasets(dataset, ...)" in fault.way_out


def test_the_changes_are_what_was_typed_or_an_option_sets() -> None:
    workload = WorkloadConfig(effective_batch_size=8, eval_batch_size=2, drop_last=True)
    loader = LoaderConfig(backend=Backend.inline, pin_memory=False, timeout_s=5)
    config = RunConfig(workload=workload, loader=loader)
    common = {"num_workers": 0, "pin_memory": False, "timeout": 5}
    assert typed_changes(config) == {**common, "batch_size": 8, "drop_last": True}
    assert typed_changes(config, "val") == {**common, "batch_size": 2}
    assert typed_changes(RunConfig()) == {}
