import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch

import wellfed
from tests.kit import sets
from wellfed.data.backends import thread_backend
from wellfed.data.backends.batch_builder import BatchBuilder
from wellfed.data.backends.batch_request import BatchRequest
from wellfed.data.settings import LoaderSettings
from wellfed.data.train_loader import train_loader

WITH_SOURCE = {**os.environ, "PYTHONPATH": str(Path(wellfed.__file__).parents[1])}
TWO = LoaderSettings("threads", 2, 2)


def loader(dataset, plan, **more):
    return sets.loader_of(dataset, plan, shuffle=False, **more)


@pytest.fixture
def live_workers():
    """The workers of this test that are alive: other tests may have left some that hang."""
    before = set(threading.enumerate())
    return lambda: [
        thread for thread in set(threading.enumerate()) - before if thread.name.startswith("wellfed-loader")
    ]


class Recording(sets.Fetching):
    """Notes the first index of what it is asked for; waits where told."""

    def __init__(self, wait=lambda first: None):
        self.asked, self.wait = [], wait

    def fetch(self, indices, rng):
        self.asked.append(int(indices[0]))
        self.wait(self.asked[-1])
        return super().fetch(indices, rng)


def requests(number):
    return (BatchRequest(0, batch, torch.tensor([batch])) for batch in range(number))


def given_by_threads(dataset, number, *plan, **more):
    plan = LoaderSettings("threads", *plan, **more)
    return thread_backend.built_by_threads(BatchBuilder(dataset, 1), requests(number), plan, number)


def test_threads_build_no_more_than_asked_ahead():
    data = Recording()
    given = given_by_threads(data, 20, 2, 3)
    assert next(given).batch["index"] == 0
    given.close()
    assert len(data.asked) <= 7  # one handed out, six ahead


def test_threads_end_with_the_epoch_and_with_an_early_close(live_workers):
    made = loader(sets.Fetching(), TWO)
    assert len(list(made)) == 6
    assert live_workers() == []
    delivered = iter(made)
    next(delivered)
    assert len(live_workers()) == 2
    made.close()
    assert live_workers() == []


HANG = """
import threading, torch
from wellfed.errors import DataError
from wellfed.data.backends import thread_backend
from wellfed.data.settings import LoaderSettings
from wellfed.data.train_loader import train_loader

thread_backend._STOP_S = 0.01

class Data(list):
    def fetch(self, indices, rng):
        threading.Event().wait()

made = train_loader(Data([0, 1, 2]), batch_size=3, seed=1, settings=LoaderSettings("threads", 1, 1, timeout_s=0.02))
try:
    next(iter(made))
except DataError:
    print("stuck, and on to the exit", flush=True)
"""


@pytest.mark.slow
def test_a_worker_that_hangs_for_ever_does_not_keep_python_from_ending():
    done = subprocess.run([sys.executable, "-c", HANG], capture_output=True, text=True, env=WITH_SOURCE, timeout=60)
    assert (done.returncode, done.stdout) == (0, "stuck, and on to the exit\n")
    assert "Traceback" not in done.stderr


def test_worker_threads_do_not_multiply_the_threads_of_torch():
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


@pytest.mark.parametrize(("workers", "prefetch"), [(1, 8), (3, 7)])
def test_deliveries_are_the_same_from_any_position(workers, prefetch, live_workers):
    def noise(made, num_epochs):
        return [delivery.batch["noise"].item() for _ in range(num_epochs) for delivery in made]

    def one_each(plan):
        return train_loader(sets.Fetching(), batch_size=1, seed=1, settings=plan)

    expected, made = noise(one_each(LoaderSettings()), 2), one_each(LoaderSettings("threads", workers, prefetch))
    assert noise(made, 2) == expected
    for position in (1, 9, sets.SIZE - 1):
        made.load_state_dict({"epoch": 0, "batch": 0})
        delivered = iter(made)
        seen = [next(delivered).batch["noise"].item() for _ in range(position)]
        assert made.state_dict() == {"epoch": 0, "batch": position}
        assert seen + noise(made, 1) == expected[: sets.SIZE]
    made.close()
    assert live_workers() == []


def test_a_batch_that_was_delivered_is_kept_by_nobody():
    alive = []

    class Watched(sets.Records):
        def fetch(self, indices, rng):
            record = super().fetch(indices, rng)
            alive.append(weakref.ref(record))
            return record

    for number, built in enumerate(given_by_threads(Watched(), 23, 1, 8), 1):
        assert built.batch.index == number - 1
        del built
        if number > 1:
            assert alive[number - 2]() is None
