"""Worker processes as such: what they hold, where they run, and how they start with spawn."""

import copy
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from torch.utils.data._utils.pin_memory import pin_memory

import wellfed
from tests.kit import sets
from wellfed import batches, process
from wellfed.data.backends import process_backend
from wellfed.data.backends.batch_builder import BatchBuilder
from wellfed.data.backends.batch_request import BatchRequest
from wellfed.data.settings import LoaderSettings
from wellfed.data.train_loader import train_loader
from wellfed.errors import DataError

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{Path(wellfed.__file__).parents[1]}{os.pathsep}{ROOT}"}
MIB = 2**20
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


class Table:
    """One tensor, a row a sample."""

    def __init__(self, num_samples):
        self.values = torch.arange(num_samples)

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return self.values[index]

    def fetch(self, indices, rng):
        return self.values.index_select(0, indices)


def private_bytes(made):
    """Of each worker: memory that is in no other process."""
    return [
        psutil.Process(process.pid).memory_full_info().uss for process in made._source._processes._iterator._workers
    ]


def private_after_some_batches(num_samples):
    made = train_loader(
        Table(num_samples),
        batch_size=512,
        seed=1,
        settings=LoaderSettings("processes", 2, 2, persistent_workers=True),
        limit_batches=20,
    )
    for _ in range(2):
        assert sum(1 for _ in made) == 20
    found = private_bytes(made)
    made.close()
    return found


@linux
def test_no_worker_holds_anything_that_grows_with_the_data():
    small, large = private_after_some_batches(10**5), private_after_some_batches(5 * 10**6)
    assert len(small) == len(large) == 2
    # The order of an epoch alone would be 40 MB.
    assert max(large) - min(small) < 8 * MIB


class Collecting(Table):
    """Makes Python look through all its objects."""

    def fetch(self, indices, rng):
        import gc

        gc.collect()
        return super().fetch(indices, rng)


@pytest.mark.slow
@linux
def test_a_collection_in_a_worker_does_not_copy_what_it_shares():
    ballast = [[] for _ in range(10**6)]  # 64 MB of objects that a collection visits
    made = train_loader(
        Collecting(100), batch_size=50, seed=1, settings=LoaderSettings("processes", 1, 1, persistent_workers=True)
    )
    assert sum(1 for _ in made) == 2
    (found,) = private_bytes(made)
    made.close()
    assert found < 40 * MIB, len(ballast)


class Surroundings:
    """Says where it is loaded."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        from threadpoolctl import threadpool_info

        pools = {pool["num_threads"] for pool in threadpool_info()}
        narrowed = os.sched_getaffinity(0) == process.CPUS_AT_START
        return torch.tensor([torch.get_num_threads(), max(pools), int(narrowed), int(os.environ["OMP_NUM_THREADS"])])


@linux
def test_workers_have_the_cpus_of_the_run_and_one_thread():
    plan = LoaderSettings("processes", 1, 1)
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    made = train_loader(Surroundings(), batch_size=4, seed=1, settings=plan)
    os.sched_setaffinity(0, {min(before)})  # as an OpenMP runtime does to the thread that loads it
    torch.set_num_threads(3)
    try:
        (delivery,) = made
    finally:
        os.sched_setaffinity(0, before)
        torch.set_num_threads(threads)
        made.close()
    assert delivery.batch.tolist() == [[1, 1, 1, 1]] * 4


SPAWN = """
import json, multiprocessing, sys
import psutil
from tests.kit import sets
from tests.data.test_learning import learned
from tests.data.backends.test_process_backend import Table, private_bytes
from wellfed.errors import DataError
from wellfed.data.backends.process_backend import WorkerLost
from wellfed.data.settings import LoaderSettings
from wellfed.data.train_loader import train_loader

def taken(made, num_epochs=2):
    found = [delivery.batch["index"].tolist() for _ in range(num_epochs) for delivery in made]
    made.close()
    return found

def main():
    multiprocessing.set_start_method("spawn")
    plan = LoaderSettings("processes", 1, 2, persistent_workers=True)
    inline = taken(train_loader(sets.Fetching(), batch_size=4, seed=1, settings=LoaderSettings()))
    spawned = taken(train_loader(sets.Fetching(), batch_size=4, seed=1, settings=plan))
    told = ""
    try:
        taken(sets.loader_of(sets.BreakingItems("kill", 6), plan, shuffle=False), 1)
    except WorkerLost as error:
        told = str(error)
    sizes = []
    for num_samples in (10**5, 5 * 10**6):
        made = train_loader(Table(num_samples), batch_size=512, seed=1, settings=plan, limit_batches=4)
        assert sum(1 for _ in made) == 4
        sizes += private_bytes(made)
        made.close()
    weights = [learned(LoaderSettings()), learned(plan)]
    print(json.dumps({"inline": inline, "spawned": spawned, "told": told, "sizes": sizes,
                      "weights": weights}))

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def spawned(tmp_path_factory):
    script = tmp_path_factory.mktemp("spawn") / "main.py"
    script.write_text(SPAWN)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=ENVIRONMENT, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_spawned_workers_give_the_same_batches_and_share_the_datas_tensors(spawned):
    assert len(spawned["inline"]) == 12
    assert spawned["spawned"] == spawned["inline"]
    inline, by_workers = spawned["weights"]
    assert by_workers == inline
    assert spawned["told"].startswith("A loader worker process ended (")
    small, large = spawned["sizes"]
    assert large - small < 8 * MIB  # the tensor alone is 40 MB


BY_BACKEND = {
    "inline": LoaderSettings(),
    "threads": LoaderSettings("threads", 2, 2),
    "processes": LoaderSettings("processes", 1, 2),
    "torch": LoaderSettings("torch"),
    "torch-1": LoaderSettings("torch", 1, 2),
}


def loader(dataset, settings, **more):
    return sets.loader_of(dataset, settings, shuffle=False, **more)


def handed_over(dataset, plan, monkeypatch):
    """What DataLoader is given."""
    seen = {}

    class Recording:
        def __init__(self, dataset, **options):
            seen.update(options, dataset=dataset)

    with monkeypatch.context() as patch:
        patch.setattr(process_backend, "DataLoader", Recording)
        process_backend.ProcessBackend(BatchBuilder(dataset, 1), plan)
    return seen


def test_the_settings_reach_the_dataloader(monkeypatch):
    plan = LoaderSettings("processes", 3, 5, persistent_workers=True, pin_memory=True, timeout_s=9)
    seen = handed_over(sets.Fetching(), plan, monkeypatch)
    assert (seen["num_workers"], seen["prefetch_factor"]) == (3, 5)
    assert seen["persistent_workers"]
    assert seen["pin_memory"]
    assert 0 < seen["timeout"] < 9  # looks in between
    assert seen["worker_init_fn"].args == (process.CPUS_AT_START,)


def test_a_dataclass_is_pinned_too(monkeypatch):
    monkeypatch.setattr(batches, "pin", lambda batch: ("pinned", batch))
    seen = handed_over(sets.Records(), BY_BACKEND["processes"], monkeypatch)
    sent = seen["collate_fn"](seen["dataset"][BatchRequest(0, 0, torch.arange(4))])
    built = pickle.loads(pickle.dumps(sent))
    assert pin_memory(built).batch[0] == "pinned"
    delivered = list(loader(sets.Records(), LoaderSettings("inline", pin_memory=True)))
    assert delivered[0].batch[0] == "pinned"
    delivered = list(loader(sets.Records(), LoaderSettings("threads", 1, 1, pin_memory=True)))
    assert delivered[0].batch[0] == "pinned"


def test_a_batch_comes_out_of_worker_processes_in_its_own_type():
    made = loader(sets.Records(), BY_BACKEND["processes"])
    assert [type(delivery.batch) for delivery in made] == [sets.Record] * 6
    made.close()
    assert copy.copy(BY_BACKEND["processes"]) == BY_BACKEND["processes"]


def test_a_fault_of_collating_in_a_worker_is_one_line():
    class Uneven(Table):
        fetch = None

        def __getitem__(self, index):
            return torch.zeros(4 if index == 2 else 3)

    made = train_loader(Uneven(8), batch_size=8, seed=1, settings=LoaderSettings("processes", 1, 2))
    with pytest.raises(DataError, match=r"^Uneven: sample 2 can't be collated into training batch 0 of epoch 0:.*\.$"):
        next(iter(made))
    made.close()
