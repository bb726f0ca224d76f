import copy
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.utils.data._utils.pin_memory import pin_memory

import wellfed
from tests.loading import sets
from wellfed.errors import DataError
from wellfed.loading import backends, batches
from wellfed.loading.backends import LoaderPlan
from wellfed.loading.build import train_loader

WITH_SOURCE = {**os.environ, "PYTHONPATH": str(Path(wellfed.__file__).parents[1])}
PLANS = {
    "inline": LoaderPlan(),
    "threads": LoaderPlan("threads", 2, 2),
    "processes": LoaderPlan("processes", 1, 2),
    "torch": LoaderPlan("torch"),
    "torch-1": LoaderPlan("torch", 1, 2),
}


def loader(dataset, plan, **more):
    return train_loader(dataset, batch_size=4, seed=1, plan=plan, shuffle=False, **more)


def live_producers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("wellfed-loader")]


@pytest.mark.parametrize("name", PLANS)
def test_an_error_keeps_its_type_and_names_the_place(name):
    made = loader(sets.Failing(6), PLANS[name])
    delivered = iter(made)
    next(delivered)
    with pytest.raises(KeyError) as caught:
        next(delivered)
    made.close()
    told = str(caught.value) + "\n".join(getattr(caught.value, "__notes__", ()))
    assert "broken" in told
    batch, sample = (
        "while fetching training batch 1 of epoch 0 (4 samples)",
        "while loading training sample 6 (epoch 0)",
    )
    assert (sample if name.startswith("torch") else batch) in told
    assert made.state_dict() == {"epoch": 0, "batch": 1}


def test_threads_build_no_more_than_asked_ahead():
    built = []
    given = backends.threads(
        lambda key: built.append(key) or key, [(0, n) for n in range(20)], LoaderPlan("threads", 2, 3)
    )
    assert next(given) == (0, 0)
    given.close()
    assert len(built) <= 6


def test_what_is_queued_is_not_built_after_an_early_close(monkeypatch):
    monkeypatch.setattr(backends, "_STOP_S", 0.01)
    built, release = [], threading.Event()

    def build(key):
        built.append(key)
        return key if key == (0, 0) else release.wait()

    given = backends.threads(build, [(0, number) for number in range(20)], LoaderPlan("threads", 2, 5))
    next(given)
    left_behind = live_producers()
    given.close()
    release.set()
    for thread in left_behind:
        thread.join()
    assert len(built) <= 3  # one delivered, one in each thread's hands


def test_threads_end_with_the_epoch_and_with_an_early_close():
    made = loader(sets.Fetching(), PLANS["threads"])
    assert len(list(made)) == 6
    assert live_producers() == []
    delivered = iter(made)
    next(delivered)
    assert len(live_producers()) == 2
    made.close()
    assert live_producers() == []


def test_dropping_an_iterator_ends_its_threads_and_not_those_of_the_next():
    made = loader(sets.Fetching(), PLANS["threads"])
    first = iter(made)
    next(first)
    second = iter(made)
    assert next(second).index == 1
    del first
    assert [delivery.index for delivery in second] == [2, 3, 4, 5]
    assert live_producers() == []


def test_a_producer_that_hangs_is_a_data_error_naming_the_knob(monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(backends, "_STOP_S", 0.01)
    given = backends.threads(lambda key: release.wait(), [(0, 0)], LoaderPlan("threads", 1, 1, timeout_s=0.02))
    with pytest.raises(DataError, match=r"within loader\.timeout_s=0\.02 s: .* Set loader\.timeout_s higher"):
        next(given)
    release.set()


def test_a_timeout_of_the_data_itself_is_not_taken_for_ours():
    def fail(key):
        raise TimeoutError("the file server")

    with pytest.raises(TimeoutError, match="the file server"):
        next(backends.threads(fail, [(0, 0)], LoaderPlan("threads", 1, 1, timeout_s=5)))


HANG = """
import threading
from wellfed.loading import backends
from wellfed.errors import DataError
backends._STOP_S = 0.01
plan = backends.LoaderPlan("threads", 1, 1, timeout_s=0.02)
given = backends.threads(lambda key: threading.Event().wait(), [(0, 0)], plan)
try:
    next(given)
except DataError:
    print("stuck, and on to the exit", flush=True)
"""


def test_a_producer_that_hangs_for_ever_does_not_keep_python_from_ending():
    done = subprocess.run([sys.executable, "-c", HANG], capture_output=True, text=True, env=WITH_SOURCE, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "stuck, and on to the exit\n", "")


def test_a_worker_process_that_is_too_slow_is_the_same_error(monkeypatch):
    def too_slow(self):
        raise RuntimeError("DataLoader timed out after 7 seconds")
        yield

    monkeypatch.setattr(torch.utils.data.DataLoader, "__iter__", too_slow)
    with pytest.raises(DataError, match=r"within loader\.timeout_s=7 s"):
        next(iter(loader(sets.Fetching(), LoaderPlan("processes", 1, 1, timeout_s=7))))


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

        def __iter__(self):
            return iter(())

    monkeypatch.setattr(backends, "DataLoader", Recording)
    with pytest.raises(ValueError, match="shorter"):
        next(iter(loader(dataset, plan)))
    return seen


@pytest.mark.parametrize("name", ["processes", "torch-1"])
def test_all_that_workers_need_is_pickled_so_spawn_works(monkeypatch, name):
    seen = handed_over(sets.Fetching(), PLANS[name], monkeypatch)
    needed = {key: seen[key] for key in ("dataset", "collate_fn", "worker_init_fn")}
    copied = pickle.loads(pickle.dumps(needed))
    key = (0, 1) if name == "processes" else (0, 4)
    one, two = seen["dataset"][key], copied["dataset"][key]
    assert str(one) == str(two)


def test_the_plan_reaches_the_dataloader(monkeypatch):
    plan = LoaderPlan("processes", 3, 5, persistent_workers=True, pin_memory=True, timeout_s=9, worker_threads=2)
    seen = handed_over(sets.Fetching(), plan, monkeypatch)
    assert (seen["num_workers"], seen["prefetch_factor"], seen["timeout"]) == (3, 5, 9)
    assert seen["persistent_workers"]
    assert seen["pin_memory"]
    counts = []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    seen["worker_init_fn"](0)
    assert counts == [2]
    seen = handed_over(sets.Fetching(), LoaderPlan("torch", 0, timeout_s=9, pin_memory=False), monkeypatch)
    assert seen["timeout"] == 0  # DataLoader refuses one without workers
    assert "prefetch_factor" not in seen


def test_a_dataclass_is_pinned_too(monkeypatch):
    monkeypatch.setattr(batches, "pin", lambda batch: ("pinned", batch))
    seen = handed_over(sets.Records(), PLANS["processes"], monkeypatch)
    built = seen["collate_fn"](seen["dataset"][0, 0])
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


def test_global_draws_differ_by_seed_epoch_and_index():
    def draw(seed, epoch, index):
        return backends.ItemBuilder(sets.Global(), seed, takes_rng=False)[epoch, index].tolist()[1:]

    assert draw(1, 0, 0) == draw(1, 0, 0)
    others = [draw(2, 0, 0), draw(1, 1, 0), draw(1, 0, 1)]
    for values in zip(draw(1, 0, 0), *others, strict=True):
        assert len(set(values)) == 4
