"""Samples that raise, hang, or kill their worker, with every backend: real processes, real signals."""

import gc
import logging
import multiprocessing
import os
import pickle
import signal
import time
from contextlib import contextmanager
from dataclasses import replace

import psutil
import pytest
import torch

from tests.kit import sets
from tests.kit.few import few, slow
from wellfed.data.backends.bad_samples import BadSamples
from wellfed.data.backends.batch_request import BatchRequest, LostSample
from wellfed.data.backends.process_backend import WorkerLost
from wellfed.data.settings import LoaderSettings
from wellfed.errors import DataError

SHORT_S = 0.25
PLANS = {
    "inline": LoaderSettings(),
    "threads": LoaderSettings("threads", 2, 2, timeout_s=SHORT_S),
    "processes": LoaderSettings("processes", 2, 2, timeout_s=SHORT_S),
    "processes-kept": LoaderSettings("processes", 2, 2, persistent_workers=True, timeout_s=SHORT_S),
    "torch": LoaderSettings("torch"),
}
PATIENT_S = 60.0
"""Timeout for samples that do not hang: starting a worker on a busy machine takes seconds."""
CASES = [("inline", sets.BreakingItems), ("processes", sets.BreakingItems), slow("torch", sets.BreakingItems)]
FETCHING = ["inline", "threads", "processes"]


@contextmanager
def ended_after(limit_s):
    """An error where it takes longer."""

    def ring(*_):
        raise TimeoutError(f"not done after {limit_s} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(limit_s)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def named(value):
    return value if isinstance(value, str) else value.__name__


def plan_of(name):
    plan = PLANS[name]
    return replace(plan, timeout_s=PATIENT_S) if plan.timeout_s else plan


loader = sets.loader_of


def taken(made, num_epochs=1):
    """(epoch, batch, total, {index: noise}) of each delivery."""
    try:
        return [
            (
                one.epoch,
                one.index,
                one.total,
                dict(zip(one.batch["index"].tolist(), one.batch["noise"].tolist(), strict=True)),
            )
            for _ in range(num_epochs)
            for one in made
        ]
    finally:
        made.close()


def without(whole, *bad):
    """The deliveries of the same run without some samples."""
    kept = [(epoch, batch, {i: x for i, x in found.items() if i not in bad}) for epoch, batch, _, found in whole]
    return [(epoch, batch, len(found), found) for epoch, batch, found in kept]


@pytest.fixture(scope="module")
def whole():
    return taken(loader(sets.Fetching(), LoaderSettings()), 2)


@pytest.fixture(autouse=True)
def _nobody_is_left_behind():
    before = set(multiprocessing.active_children())
    yield
    gc.collect()  # an error's traceback holds the workers
    until_s = time.monotonic() + 10  # a process that was killed takes a moment to end on a busy machine
    while set(multiprocessing.active_children()) != before and time.monotonic() < until_s:
        time.sleep(0.01)
    assert set(multiprocessing.active_children()) == before


@pytest.mark.parametrize("name", FETCHING)
def test_a_fetch_that_raises_names_the_batch_with_its_indices(name):
    made = loader(sets.Breaking("raise", 6), plan_of(name), shuffle=False, max_skipped=2)
    with pytest.raises(DataError) as caught:
        taken(made)
    told = str(caught.value)
    assert "Breaking: fetch could not load training batch 1 of epoch 0 (samples 4, 5, 6, 7): OSError" in told
    assert "loader.skip_ids" in told
    assert "in breaks" in caught.value.__notes__[0]  # also of a worker
    assert made.state_dict() == {"epoch": 0, "batch": 1}


@pytest.mark.parametrize(("name", "kind"), CASES, ids=named)
def test_with_max_skipped_the_step_has_fewer_samples_and_all_else_stays(name, kind, whole, caplog):
    events = []
    made = loader(
        kind("raise", 6, 15), plan_of(name), max_skipped=2, on_event=lambda kind, **facts: events.append(facts)
    )
    with caplog.at_level(logging.WARNING):
        assert taken(made, 2) == without(whole, 6, 15)
    assert sorted(event["index"] for event in events) == [6, 15]  # once each, though there are two epochs
    for event in events:
        assert "OSError: truncated (sets.py:" in event["reason"]
        warned = [text for text in caplog.messages if f"training sample {event['index']} is left out" in text]
        assert len(warned) == 1


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("processes", sets.BreakingItems),
        slow("threads", sets.Breaking),
    ],
    ids=named,
)
def test_a_batch_that_hangs_is_an_error_that_names_what_was_asked_for(name, kind, caplog):
    made = loader(kind("hang", 6), replace(PLANS[name], timeout_s=3), max_skipped=3, shuffle=False)
    with caplog.at_level(logging.INFO), ended_after(60), pytest.raises(DataError) as caught:
        taken(made)
    told = str(caught.value)
    assert told.startswith("No batch came within loader.timeout_s=3 s: a worker is stuck or too slow. ")
    assert "It was asked for training batch 1 of epoch 0 (samples 4, 5, 6, 7). Set loader.timeout_s higher" in told
    assert "add it to loader.skip_ids" in told
    assert made.state_dict() == {"epoch": 0, "batch": 1}


@pytest.mark.parametrize("how", ["kill", slow("exit 1")])
def test_a_worker_that_ends_is_reported(how):
    made = loader(sets.BreakingItems(how, 6), plan_of("processes"), max_skipped=3, shuffle=False)
    with ended_after(60), pytest.raises(WorkerLost, match=r"^A loader worker process ended .*, mostly for want"):
        taken(made)
    assert made.state_dict()["batch"] <= 1  # the batch before may be lost with its worker


def test_after_a_worker_was_lost_the_loader_can_be_read_again(tmp_path):
    made = loader(FirstTime(str(tmp_path / "flag")), plan_of("processes-kept"), shuffle=False)
    seen = []
    with pytest.raises(WorkerLost):
        seen.extend(one.index for one in made)
    seen += [one.index for one in made]
    made.close()
    assert seen == list(range(6))


class FirstTime(sets.BreakingItems):
    """Kills the first worker that reads sample 6, as the kernel does when memory runs out."""

    def __init__(self, flag, how="kill"):
        super().__init__(how, 6)
        self.flag = flag

    def breaks(self):
        if not os.path.exists(self.flag):
            open(self.flag, "w").close()
            super().breaks()


def test_a_worker_killed_during_a_step_is_reported_when_its_batch_is_asked_for(monkeypatch):
    made = loader(sets.Fetching(), LoaderSettings("processes", 1, 1))
    handler = signal.getsignal(signal.SIGCHLD)
    monkeypatch.setattr(torch.utils.data._utils.signal_handling, "_SIGCHLD_handler_set", False)
    delivered = iter(made)
    next(delivered)
    assert signal.getsignal(signal.SIGCHLD) is handler  # torch's would raise in the midst of a step
    for process in multiprocessing.active_children():
        os.kill(process.pid, signal.SIGKILL)
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            pass  # no error here
    with pytest.raises(WorkerLost, match=r"mostly .* loader.num_workers"):
        list(delivered)
    made.close()


class Misspelled(sets.BreakingItems):
    def breaks(self):
        return self.no_such_thing


def test_an_error_of_the_code_is_not_answered_by_skipping_at_once():
    for name in ("inline", "processes"):
        with pytest.raises(DataError, match=r"sample 6 .*AttributeError.*\(test_bad_samples.py:") as caught:
            taken(loader(Misspelled("", 6), PLANS[name]))
        told = str(caught.value)
        assert told.endswith("Then mend the code of the dataset. Otherwise set loader.skip_ids=[6], or repair it.")


def test_ranks_cannot_skip():
    with pytest.raises(ValueError, match="max_skipped needs one rank"):
        loader(sets.Fetching(), LoaderSettings(), max_skipped=1, world_size=2)
    made = loader(sets.BreakingItems("raise", *range(23)), LoaderSettings(), world_size=2)
    with pytest.raises(DataError) as caught:
        taken(made)
    assert "max_skipped" not in str(caught.value)


@pytest.mark.parametrize("purpose", ["training", "evaluation"])
def test_cuda_in_a_worker_is_no_samples_fault(purpose):
    reason = "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, ..."
    bad = BadSamples("Data", LoaderSettings(), purpose=purpose)
    told = r"21 could not be loaded by a worker .*CUDA in forked .* such as .* or the GPU\..*loader.backend=inline"
    with pytest.raises(DataError, match=f"^Data: {purpose} sample {told}") as raised:
        bad.take([LostSample(21, reason)], BatchRequest(0, 0, torch.tensor([21])), lambda index: True)
    assert "skip_ids" not in str(raised.value)


@pytest.mark.parametrize("name", ["inline", "processes"])
def test_a_bad_sample_is_named_with_the_way_out(name):
    made = loader(sets.BreakingItems("raise", 6), plan_of(name), skip_ids=(22,))
    with pytest.raises(DataError) as caught:
        taken(made)
    told = str(caught.value)
    assert f"training sample 6 could not be loaded (epoch 0, batch {made.state_dict()['batch']})" in told
    assert "OSError: truncated (sets.py:" in told
    assert "loader.skip_ids=[22,6]" in told
    assert "loader.max_skipped=1" in told
    cause = caught.value.__cause__
    assert "in breaks" in (str(cause) if name == "processes" else "in breaks")  # the worker's traceback


@pytest.mark.parametrize("name", few(["inline", "processes"], 1))
def test_one_more_than_max_skipped_is_an_error_naming_all(name):
    made = loader(sets.BreakingItems("raise", 8, 9, 14), plan_of(name), max_skipped=2, shuffle=False)
    with pytest.raises(DataError) as caught:
        taken(made)
    told = str(caught.value)
    assert "loader.max_skipped=2 allows no more" in told
    assert "loader.skip_ids=[8,9,14]" in told
    assert made.state_dict() == {"epoch": 0, "batch": 3, "skipped": [8, 9]}


@pytest.mark.parametrize(("name", "stop"), [("inline", 1), ("inline", 7), slow("processes", 8)])
def test_a_resumed_run_leaves_the_same_samples_out(name, stop, whole):
    made, seen = loader(sets.BreakingItems("raise", 6, 15), plan_of(name), max_skipped=2), []
    while len(seen) < stop:
        for delivery in made:
            seen.append((delivery.epoch, delivery.index, delivery.total, delivery.batch["index"].tolist()))
            if len(seen) == stop:
                break
    state = pickle.loads(pickle.dumps(made.state_dict()))
    made.close()
    again = loader(sets.BreakingItems("raise", 6, 15), PLANS[name], max_skipped=2)
    again.load_state_dict(state)
    while len(seen) < 12:
        seen += [(one.epoch, one.index, one.total, one.batch["index"].tolist()) for one in again]
    again.close()
    assert seen == [(epoch, batch, total, list(found)) for epoch, batch, total, found in without(whole, 6, 15)]


def test_a_step_that_has_lost_all_its_samples_is_an_error_and_they_are_not_asked_for_again():
    made = loader(sets.BreakingItems("hang", 5), LoaderSettings(), batch_size=1, max_skipped=1, shuffle=False)
    made.load_state_dict({"epoch": 3, "batch": 4, "skipped": [5]})  # inline: asking would hang for ever
    with pytest.raises(DataError, match=r"training batch 5 of epoch 3.*skip_ids=\[5\]"):
        taken(made)
    assert made.state_dict()["batch"] == 5  # the one before it was delivered


class Unsent(sets.Fetching):
    """One batch holds something that can't be pickled."""

    def __reduce__(self):
        raise RuntimeError("No space left")

    def fetch(self, indices, rng):
        batch = super().fetch(indices, rng)
        return {**batch, "unsent": self} if 6 in indices.tolist() else batch


def test_a_batch_that_cannot_be_sent_is_an_error_and_not_waited_for():
    made = loader(Unsent(), LoaderSettings("processes", 2, 2))
    with (
        ended_after(60),
        pytest.raises(DataError, match="could not send .* No space left.*Let the data return"),
    ):
        list(made)
    made.close()
