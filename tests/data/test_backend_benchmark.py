import random
import threading
import time

import numpy as np
import torch

from tests.kit import sets
from tests.kit.sets import Failing, Fetching, Global
from wellfed.data.backend_benchmark import TrialStep, build_first_batches, time_backends, time_step
from wellfed.data.settings import LoaderSettings
from wellfed.data.train_loader import train_loader

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


def loaders(dataset, batch_size=4):
    return lambda plan: train_loader(dataset, batch_size=batch_size, seed=7, settings=plan)


def tried(dataset, *plans, step=None):
    make = loaders(dataset)
    found = build_first_batches(make, INLINE)
    return found if found is None else time_backends(make, plans, found, step)


def states():
    return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()


def test_one_batch_is_sized_and_timed():
    found = build_first_batches(loaders(Sleeping()), INLINE)
    assert found.batch_bytes == 4 * (8 + 4 + 8)
    assert found.num_batches == 6
    assert found.build_ms > 2.5
    assert found.waits_outside  # it sleeps
    assert (found.step_ms, found.timed, found.failed) == (None, {}, ())


def test_a_step_is_timed_when_it_is_warm():
    seen = []

    def run(batch):
        time.sleep(0.2 if not seen else 0.004)
        seen.append(batch["index"].tolist())

    step = TrialStep(run, lambda: None)
    data = Noting()
    found = build_first_batches(loaders(data), INLINE)
    known = time_step(loaders(data), INLINE, found, step)
    assert 4 < known.step_ms < 100
    assert seen[:2] == data.asked[:2]  # the first batches of training
    timed = time_backends(loaders(data), [INLINE, THREADS], known, step)
    assert timed.timed["inline"] > 4


def test_nothing_of_the_process_changes():
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    before, threads = states(), threading.active_count()
    trial = tried(Global(), INLINE, PROCESSES, TORCH)
    assert set(trial.timed) == {"inline", "processes", "torch"}
    assert states() == before
    assert tried(Fetching(), THREADS).timed
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
        return sets.loader_of(sets.BreakingItems("raise", 3), plan, seed=7, max_skipped=1, shuffle=False)

    trial = build_first_batches(make, INLINE)
    assert trial.num_batches == 6
    assert caplog.messages == []
    assert len(list(make(INLINE))) == 6
    assert "training sample 3 is left out" in caplog.text


def test_a_backend_that_fails_is_named_and_the_others_are_timed():
    trial = tried(HereOnly(), THREADS, INLINE)
    assert (trial.failed, list(trial.timed)) == (("threads",), ["inline"])
