import random
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.kit import sets
from tests.kit.sets import SIZE, Breaking, Failing, Fetching, Global
from wellfed.data.backend_benchmark import copied, time_first_batches
from wellfed.data.backends import thread_backend
from wellfed.data.settings import LoaderSettings
from wellfed.data.train_loader import train_loader
from wellfed.process import Stopped

INLINE = LoaderSettings()
THREADS = LoaderSettings("threads", num_workers=1, prefetch_factor=2)
PROCESSES = LoaderSettings("processes", num_workers=1, prefetch_factor=2)
TORCH = LoaderSettings("torch")


class Sleeping(Fetching):
    """3 ms a batch, in which others may run."""

    def fetch(self, indices, rng):
        time.sleep(0.003)
        return super().fetch(indices, rng)


class Noting(Fetching):
    """Notes what was asked for."""

    def __init__(self):
        self.asked = []

    def fetch(self, indices, rng):
        self.asked.append(indices.tolist())
        return super().fetch(indices, rng)


class HereOnly(Fetching):
    """Can't be used outside the main thread."""

    def fetch(self, indices, rng):
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("not here")
        return super().fetch(indices, rng)


class Stopping(Fetching):
    def fetch(self, indices, rng):
        raise Stopped(2)


def loaders(dataset, batch_size=4):
    return lambda plan: train_loader(dataset, batch_size=batch_size, seed=7, settings=plan)


def tried(dataset, *plans, on_gpu=True):
    return time_first_batches(loaders(dataset), lambda _: plans, INLINE, on_gpu=on_gpu)


def states():
    return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()


def test_one_batch_is_sized_and_timed():
    seen = []
    trial = time_first_batches(loaders(Sleeping()), lambda first: seen.append(first) or (), INLINE, on_gpu=True)
    assert seen == [trial]
    assert trial.batch_bytes == 4 * (8 + 4 + 8)
    assert trial.num_batches == 6
    assert 2.5 < trial.build_ms == trial.step_ms
    assert (trial.timed, trial.failed) == ({}, ())


def test_what_is_known_is_not_built_again():
    known, data, seen = tried(Sleeping()), Noting(), []
    trial = time_first_batches(loaders(data), lambda first: seen.append(first) or (), INLINE, on_gpu=True, known=known)
    assert (trial, seen, data.asked) == (known, [known], [])
    timed = time_first_batches(loaders(data), lambda _: (INLINE,), INLINE, on_gpu=True, known=known)
    assert (timed.build_ms, set(timed.timed)) == (known.build_ms, {"inline"})


def test_a_fast_batch_is_measured_against_steps_of_a_millisecond():
    trial = tried(Fetching(), INLINE)
    assert trial.build_ms < trial.step_ms == 1.0 or trial.build_ms == trial.step_ms
    assert set(trial.timed) == {"inline"}


def test_threads_lose_less_where_building_leaves_the_lock():
    gains_ms = []
    for _ in range(5):  # a machine under load disturbs some
        trial = tried(Sleeping(), INLINE, THREADS)
        assert list(trial.timed) == ["inline", "threads"]
        assert all(found.noise_ms >= 0 for found in trial.timed.values())
        gains_ms.append(trial.timed["inline"].period_ms - trial.timed["threads"].period_ms)
    assert max(gains_ms) > 1


@pytest.mark.parametrize("on_gpu", [True, False])
def test_nothing_of_the_process_changes(on_gpu):
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    before, threads = states(), threading.active_count()
    trial = tried(Global(), INLINE, PROCESSES, TORCH, on_gpu=on_gpu)
    assert set(trial.timed) == {"inline", "processes", "torch"}
    assert states() == before
    assert tried(Fetching(), THREADS, on_gpu=on_gpu).timed
    assert states() == before
    assert threading.active_count() == threads


def test_training_gets_the_batches_that_it_would_get():
    data = Noting()
    tried(data, INLINE, THREADS)
    of_trial = data.asked[:6]
    loader = loaders(data)(INLINE)
    assert loader.state_dict() == {"epoch": 0, "batch": 0}
    data.asked.clear()
    assert len(list(loader)) == 6
    assert data.asked == of_trial  # the real first batches


def test_data_that_fails_is_left_for_training_to_tell():
    assert tried(Failing(bad=int(next(iter(loaders(Fetching())(INLINE))).batch["index"][0])), INLINE) is None


def test_samples_that_may_be_left_out_are_told_by_training_not_by_the_trial(caplog):
    def make(plan):
        return sets.loader_of(Failing(bad=3), plan, seed=7, max_skipped=1, shuffle=False)

    trial = time_first_batches(make, lambda _: (), THREADS, on_gpu=True)
    assert (trial.num_batches, trial.batch_bytes) == (6, 3 * (8 + 4 + 8))
    assert caplog.messages == []
    assert len(list(make(INLINE))) == 6
    assert "training sample 3 is left out" in caplog.text


def test_a_backend_that_fails_is_named_and_the_others_are_timed():
    trial = tried(HereOnly(), THREADS, INLINE)
    assert (trial.failed, list(trial.timed)) == (("threads",), ["inline"])


@pytest.mark.parametrize("bad", [0, 5], ids=["the first batch", "another"])
def test_what_hangs_ends_the_trial_within_the_timeout(bad, monkeypatch):
    monkeypatch.setattr(thread_backend, "_STOP_S", 0.01)

    def make(plan):
        return train_loader(Breaking("hang", bad), batch_size=4, seed=7, settings=plan, shuffle=False)

    began_s = time.monotonic()
    watched = replace(THREADS, timeout_s=0.2)
    assert time_first_batches(make, lambda _: (), watched, on_gpu=True) is None
    assert time.monotonic() - began_s < 5


def test_a_request_to_stop_is_not_swallowed():
    with pytest.raises(Stopped):
        tried(Stopping(), INLINE)


def test_every_loader_is_closed_also_after_an_error():
    made, closed = [], []

    def make(plan):
        loader = loaders(HereOnly())(plan)
        loader.close = lambda: closed.append(loader)
        made.append(loader)
        return loader

    time_first_batches(make, lambda _: (INLINE, THREADS), INLINE, on_gpu=True)
    assert len(closed) == 3
    assert closed == made


def test_an_epoch_of_one_batch_is_enough():
    trial = time_first_batches(loaders(Fetching(), SIZE), lambda _: (INLINE, THREADS), INLINE, on_gpu=True)
    assert (trial.num_batches, set(trial.timed)) == (1, {"inline", "threads"})


def test_batches_are_not_pinned():
    plans = []

    def make(plan):
        plans.append(plan)
        return loaders(Fetching())(plan)

    time_first_batches(make, lambda _: (LoaderSettings(pin_memory=True),), INLINE, on_gpu=True)
    assert [plan.pin_memory for plan in plans] == [False, False]


class Lazy(Fetching):
    """Opens its file on first use, as each worker process should."""

    file = None

    def fetch(self, indices, rng):
        self.file = self.file or object()
        return super().fetch(indices, rng)


class Closing(Fetching):
    def __del__(self):
        pass


class Uncopied(Fetching):
    def __reduce_ex__(self, protocol):
        raise TypeError("no")


def test_what_a_dataset_opens_on_first_use_stays_with_the_trial():
    data = Lazy()
    assert tried(copied(data), INLINE)
    assert data.file is None


@pytest.mark.parametrize("kind", [Closing, Uncopied])
def test_a_dataset_that_can_not_safely_be_copied_is_used_itself(kind):
    data = kind()
    assert copied(data) is data
