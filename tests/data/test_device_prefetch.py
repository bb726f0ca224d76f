import threading
import time

import pytest
import torch

from tests.kit.sets import Failing, Fetching
from wellfed.data import device_prefetch
from wellfed.data.device_prefetch import DevicePrefetcher
from wellfed.data.eval_loader import EvalLoader
from wellfed.data.settings import LoaderSettings
from wellfed.data.train_loader import train_loader
from wellfed.errors import DataError

CPU = torch.device("cpu")
PLANS = [
    LoaderSettings(),
    LoaderSettings("threads", num_workers=2, prefetch_factor=2),
    LoaderSettings("processes", num_workers=1, prefetch_factor=2, persistent_workers=True),
]


def loader(plan=PLANS[0], data=None, batch_size=4):
    return train_loader(data or Fetching(), batch_size=batch_size, seed=5, settings=plan)


def ids(deliveries):
    return [delivery.batch["index"].tolist() for delivery in deliveries]


def two_epochs(batches):
    return [(one.epoch, one.index, one.batch["index"].tolist()) for _ in range(2) for one in batches]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.backend)
@pytest.mark.parametrize("ahead", [1, 3, 50])
def test_the_same_deliveries_in_the_same_order(plan, ahead):
    prefetcher = DevicePrefetcher(loader(plan), CPU, ahead)
    try:
        assert two_epochs(prefetcher) == two_epochs(loader())
    finally:
        prefetcher.close()


@pytest.mark.parametrize("stop", range(1, 7))
def test_the_position_is_that_of_what_was_handed_out(stop):
    whole = two_epochs(loader())
    prefetcher = DevicePrefetcher(loader(), CPU, 4)
    deliveries = iter(prefetcher)
    for _ in range(stop):
        next(deliveries)
    state = prefetcher.state_dict()
    prefetcher.close()
    assert state == {"epoch": 0, "batch": stop}
    resumed = DevicePrefetcher(loader(), CPU, 4)
    resumed.load_state_dict(state)
    again = (
        two_epochs(resumed) if stop < 6 else [(one.epoch, one.index, one.batch["index"].tolist()) for one in resumed]
    )
    assert again[: len(whole) - stop] == whole[stop:]
    # The one that was stopped goes on there too.
    assert ids(prefetcher)[0] == whole[stop][2]
    prefetcher.close()


def test_no_more_than_asked_is_read_ahead():
    fetched = []

    class Watched(Fetching):
        def fetch(self, indices, rng):
            fetched.append(len(fetched))
            return super().fetch(indices, rng)

    prefetcher = DevicePrefetcher(loader(data=Watched()), CPU, 2)
    deliveries = iter(prefetcher)
    next(deliveries)
    until_s = time.monotonic() + 5
    while len(fetched) < 4 and time.monotonic() < until_s:
        time.sleep(0.001)
    time.sleep(0.02)
    assert len(fetched) == 4  # one handed out, two ahead, and one for which there is no place yet
    prefetcher.close()


def test_batches_are_moved_beside_the_step_and_handed_out_as_moved():
    threads = set()

    def move(batch, device):
        threads.add(threading.current_thread().name)
        return {**batch, "moved": True}

    prefetcher = DevicePrefetcher(loader(), CPU, 2, move=move)
    for delivery in prefetcher:
        assert delivery.batch["moved"]
    assert threads == {"wellfed-device-prefetch"}


@pytest.mark.parametrize("plan", PLANS[:2], ids=lambda plan: plan.backend)
def test_an_error_comes_out_where_its_batch_would(plan):
    bad = int(loader().__iter__().__next__().batch["index"][0])
    expected = ids(loader())
    prefetcher = DevicePrefetcher(loader(plan, Failing(bad)), CPU, 3)
    with pytest.raises(DataError, match="training batch 0 of epoch 0"):
        list(prefetcher)
    last = expected[-1][0]
    prefetcher = DevicePrefetcher(loader(plan, Failing(last)), CPU, 3)
    seen = []

    def read():
        for delivery in prefetcher:
            seen.append(delivery.batch["index"].tolist())  # noqa: PERF401  one by one, up to the error

    with pytest.raises(DataError, match=rf"samples? .*\b{last}\b"):
        read()
    assert seen == expected[:-1]
    prefetcher.close()


def test_a_split_whose_length_has_changed_is_told():
    data = Fetching()
    prefetcher = DevicePrefetcher(EvalLoader(data, 4, seed=1), CPU, 1)
    assert len(ids(prefetcher)) == 6
    data.__class__ = type("Shorter", (Fetching,), {"__len__": lambda self: 8})
    told = []

    def read():
        with pytest.raises(DataError, match="has 8 samples, and had 23") as caught:
            list(prefetcher)
        told.append(caught)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(20)
    assert told


def test_what_is_dropped_half_way_leaves_no_thread():
    before = set(threading.enumerate())

    def running():
        return [thread for thread in threading.enumerate() if thread not in before]

    prefetcher = DevicePrefetcher(loader(PLANS[1]), CPU, 2)
    for _ in prefetcher:
        break
    prefetcher.close()
    until_s = time.monotonic() + 5
    while running() and time.monotonic() < until_s:
        time.sleep(0.01)
    assert running() == []


def test_a_data_set_that_hangs_does_not_keep_close_waiting(monkeypatch):
    monkeypatch.setattr(device_prefetch, "_STOP_S", 0.01)
    hang = threading.Event()

    class Hanging(Fetching):
        def fetch(self, indices, rng):
            hang.wait(30)
            return super().fetch(indices, rng)

    prefetcher = DevicePrefetcher(loader(data=Hanging()), CPU, 1)
    deliveries = iter(prefetcher)
    threading.Thread(target=lambda: next(deliveries, None), daemon=True).start()
    time.sleep(0.05)
    began_s = time.monotonic()
    prefetcher.close()
    assert time.monotonic() - began_s < 15
    hang.set()


class Reusing:
    """Hands out views of one pinned buffer, and poisons what it handed out before."""

    def __init__(self, size=4096, width=2048):
        self.rows = torch.arange(size, dtype=torch.float32).unsqueeze(1).expand(size, width)
        self.buffer = torch.empty(256, width).pin_memory()

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index], torch.tensor(index)

    def fetch(self, indices, rng):
        self.buffer.fill_(float("nan"))
        view = self.buffer[: len(indices)]
        torch.index_select(self.rows, 0, indices, out=view)
        return view, indices.pin_memory()


@pytest.mark.gpu
@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_buffers_may_be_used_again_on_both_sides(ahead):
    device = torch.device("cuda", 0)
    width = 64 if torch.cuda.get_device_name().startswith("Simulated") else 2048  # a real one is to be kept busy
    data = Reusing(width=width)
    prefetcher = DevicePrefetcher(train_loader(data, batch_size=256, seed=1, settings=LoaderSettings()), device, ahead)
    weight = torch.ones(width, width, device=device)
    for _ in range(5):
        for delivery in prefetcher:
            rows, indices = delivery.batch
            for _ in range(8):  # work in flight while the next batches are copied
                torch.mm(rows, weight)
            wrong = (rows != indices.unsqueeze(1)).any()
            del rows, delivery  # its memory is free for a batch that is copied meanwhile
            assert not wrong
    prefetcher.close()
