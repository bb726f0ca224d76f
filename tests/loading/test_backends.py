import copy
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.utils.data._utils.pin_memory import pin_memory

import wellfed
from tests.loading import sets
from wellfed import cpus
from wellfed.errors import DataError
from wellfed.loading import backends, batches, processes
from wellfed.loading.backends import LoaderPlan
from wellfed.loading.build import train_loader
from wellfed.loading.builder import BatchBuilder
from wellfed.loading.requests import Request

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


class Recording(sets.Fetching):
    """Notes the first index of what it is asked for; waits where told."""

    def __init__(self, wait=lambda first: None):
        self.asked, self.wait = [], wait

    def fetch(self, indices, rng):
        self.asked.append(int(indices[0]))
        self.wait(self.asked[-1])
        return super().fetch(indices, rng)


def requests(number):
    return (Request(0, batch, torch.tensor([batch])) for batch in range(number))


def given_by_threads(dataset, number, *plan, **more):
    return backends.threads(BatchBuilder(dataset, 1), requests(number), LoaderPlan("threads", *plan, **more))


def test_threads_build_no_more_than_asked_ahead():
    data = Recording()
    given = given_by_threads(data, 20, 2, 3)
    assert next(given).batch["index"] == 0
    given.close()
    assert len(data.asked) <= 6


def test_what_is_queued_is_not_built_after_an_early_close(monkeypatch):
    monkeypatch.setattr(backends, "_STOP_S", 0.01)
    release = threading.Event()
    data = Recording(lambda first: first and release.wait())
    given = given_by_threads(data, 20, 2, 5)
    next(given)
    left_behind = live_producers()
    given.close()
    release.set()
    for thread in left_behind:
        thread.join()
    assert len(data.asked) <= 3  # one delivered, one in each thread's hands


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


def test_a_producer_that_is_late_without_hanging_is_a_data_error_naming_the_knob():
    data = sets.Slow()
    builder = BatchBuilder(data, 1)
    plan = LoaderPlan("threads", 1, 1, timeout_s=0.5)
    builder.dataset.fetch = lambda indices, rng: (
        threading.Event().wait(0.3 * len(indices)) or super(sets.Slow, data).fetch(indices, rng)
    )
    given = backends.threads(builder, [Request(0, 0, torch.arange(4))], plan)
    with pytest.raises(DataError, match=r"within loader\.timeout_s=0\.5 s: .* Set loader\.timeout_s higher"):
        next(given)


def test_a_timeout_of_the_data_itself_is_not_taken_for_ours():
    class FileServer(sets.Fetching):
        def fetch(self, indices, rng):
            raise TimeoutError("the file server")

    (built,) = given_by_threads(FileServer(), 1, 1, 1, timeout_s=5)
    assert built.lost[0].reason.startswith("TimeoutError: the file server")


HANG = """
import threading, torch
from wellfed.errors import DataError
from wellfed.loading import backends
from wellfed.loading.build import train_loader

backends._STOP_S = 0.01

class Data(list):
    def fetch(self, indices, rng):
        threading.Event().wait()

made = train_loader(Data([0, 1, 2]), batch_size=3, seed=1, plan=backends.LoaderPlan("threads", 1, 1, timeout_s=0.02))
try:
    next(iter(made))
except DataError:
    print("stuck, and on to the exit", flush=True)
"""


def test_a_producer_that_hangs_for_ever_does_not_keep_python_from_ending():
    done = subprocess.run([sys.executable, "-c", HANG], capture_output=True, text=True, env=WITH_SOURCE, timeout=60)
    assert (done.returncode, done.stdout) == (0, "stuck, and on to the exit\n")
    assert "Traceback" not in done.stderr


def test_producer_threads_do_not_multiply_the_threads_of_torch():
    counts = []
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        given = given_by_threads(Recording(lambda first: counts.append(torch.get_num_threads())), 4, 2, 2)
        assert len(list(given)) == 4
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert counts == [1] * 4


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
