import copy
import threading

import pytest
import torch
from torch.utils.data._utils.pin_memory import pin_memory

from tests.loading import sets
from wellfed import batches, cpus
from wellfed.errors import DataError
from wellfed.loading import processes
from wellfed.loading.backends import LoaderPlan
from wellfed.loading.loaders import train_loader
from wellfed.loading.requests import Request

PLANS = {
    "inline": LoaderPlan(),
    "threads": LoaderPlan("threads", 2, 2),
    "processes": LoaderPlan("processes", 1, 2),
    "torch": LoaderPlan("torch"),
    "torch-1": LoaderPlan("torch", 1, 2),
}


def loader(dataset, plan, **more):
    return train_loader(dataset, batch_size=4, seed=1, plan=plan, shuffle=False, **more)


def test_a_worker_process_that_is_too_slow_is_the_same_error():
    class Late(sets.Fetching):
        def __getitem__(self, index, rng):
            threading.Event().wait(0.3)
            return super().__getitem__(index, rng)

    Late.fetch = None
    made = loader(Late(), LoaderPlan("processes", 1, 1, timeout_s=1))
    with pytest.raises(DataError, match=r"within loader\.timeout_s=1 s"):
        next(iter(made))
    made.close()


def test_another_error_of_the_dataloader_passes(monkeypatch):
    def fails(self):
        raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed.")
        yield

    monkeypatch.setattr(torch.utils.data.DataLoader, "__iter__", fails)
    with pytest.raises(RuntimeError, match="killed by signal"):
        next(iter(loader(sets.Fetching(), PLANS["processes"])))


def handed_over(dataset, plan, monkeypatch):
    """What DataLoader is given."""
    seen = {}

    class Recording:
        def __init__(self, dataset, **options):
            seen.update(options, dataset=dataset)

    with monkeypatch.context() as patch:
        patch.setattr(processes, "DataLoader", Recording)
        loader(dataset, plan)
    return seen


def test_the_plan_reaches_the_dataloader(monkeypatch):
    plan = LoaderPlan("processes", 3, 5, persistent_workers=True, pin_memory=True, timeout_s=9, worker_threads=2)
    seen = handed_over(sets.Fetching(), plan, monkeypatch)
    assert (seen["num_workers"], seen["prefetch_factor"]) == (3, 5)
    assert seen["persistent_workers"]
    assert seen["pin_memory"]
    assert 0 < seen["timeout"] < 9  # looks in between
    assert seen["worker_init_fn"].num_threads == 2
    assert seen["worker_init_fn"].cpus == cpus.AT_START
    seen = handed_over(sets.Fetching(), LoaderPlan("torch", 0, timeout_s=9, pin_memory=False), monkeypatch)
    assert "timeout" not in seen  # DataLoader refuses one without workers
    assert "prefetch_factor" not in seen
    seen = handed_over(sets.Fetching(), LoaderPlan("torch", 1), monkeypatch)
    assert seen["worker_init_fn"].num_threads == 1


def test_a_dataclass_is_pinned_too(monkeypatch):
    monkeypatch.setattr(batches, "pin", lambda batch: ("pinned", batch))
    seen = handed_over(sets.Records(), PLANS["processes"], monkeypatch)
    built = seen["collate_fn"](seen["dataset"][Request(0, 0, torch.arange(4))])
    assert pin_memory(built).batch[0] == "pinned"
    delivered = list(loader(sets.Records(), LoaderPlan("inline", pin_memory=True)))
    assert delivered[0].batch[0] == "pinned"
    delivered = list(loader(sets.Records(), LoaderPlan("threads", 1, 1, pin_memory=True)))
    assert delivered[0].batch[0] == "pinned"


def test_a_batch_comes_out_of_worker_processes_in_its_own_type():
    made = loader(sets.Records(), PLANS["processes"])
    assert [type(delivery.batch) for delivery in made] == [sets.Record] * 6
    made.close()
    assert copy.copy(PLANS["processes"]) == PLANS["processes"]
