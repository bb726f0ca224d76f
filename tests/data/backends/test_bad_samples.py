"""Samples that raise, hang, or kill who loads them, with every backend: real processes, real signals."""

import gc
import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

import wellfed
from tests.kit import sets
from wellfed.data.backends import process_backend
from wellfed.data.backends.bad_samples import BadSamples, WorkerLost, evaluation_error
from wellfed.data.backends.batch_request import LostSample
from wellfed.data.eval_loader import EvalLoader
from wellfed.data.settings import LoaderSettings
from wellfed.errors import DataError

ROOT = Path(__file__).parents[3]
SHORT_S = 0.25
PLANS = {
    "inline": LoaderSettings(),
    "threads": LoaderSettings("threads", 2, 2, timeout_s=SHORT_S),
    "processes": LoaderSettings("processes", 2, 2, timeout_s=SHORT_S),
    "processes-kept": LoaderSettings("processes", 2, 2, persistent_workers=True, timeout_s=SHORT_S),
    "torch": LoaderSettings("torch"),
    "torch-1": LoaderSettings("torch", 1, 2, timeout_s=SHORT_S),
}
PATIENT_S = 60.0
"""Where nothing hangs: starting a worker on a busy machine is none."""
KINDS = [sets.Breaking, sets.BreakingItems]
CASES = [
    *((name, kind, "raise") for name in ("inline", "threads", "processes") for kind in KINDS),
    *((name, sets.BreakingItems, "raise") for name in ("torch", "torch-1")),
    *((name, kind, "hang") for name in ("threads", "processes") for kind in KINDS),
    *(("processes", kind, "kill") for kind in KINDS),
    *((name, sets.BreakingItems, how) for name in ("processes-kept", "torch-1") for how in ("hang", "kill")),
    ("processes", sets.BreakingItems, "exit 1"),
    ("processes", sets.BreakingItems, "exit 0"),
]
SLOW = [
    ("threads", sets.Breaking, "hang"),
    ("processes", sets.BreakingItems, "hang"),
    ("processes", sets.Breaking, "kill"),
    ("processes-kept", sets.BreakingItems, "hang"),
    ("torch-1", sets.BreakingItems, "kill"),
    ("processes", sets.BreakingItems, "exit 1"),
]
"""Each backend, each kind and each end is among the others too."""
MARKED = [pytest.param(*case, marks=[pytest.mark.slow] * (case in SLOW)) for case in CASES]
REASONS = {
    "raise": "OSError: truncated (sets.py:",
    "hang": "it did not come within loader.timeout_s=0.25",
    "kill": "its worker process was killed by SIGKILL",
    "exit 1": "its worker process ended by itself with exit code 1",
    "exit 0": "its worker process ended by itself with exit code 0",
}


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


def plan_of(name, how="raise"):
    plan = PLANS[name]
    return plan if how == "hang" or not plan.timeout_s else replace(plan, timeout_s=PATIENT_S)


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
    if set(multiprocessing.active_children()) != before:
        gc.collect()  # an error's traceback holds what it went through
    assert set(multiprocessing.active_children()) == before


@pytest.mark.parametrize(("name", "kind", "how"), MARKED, ids=named)
def test_a_bad_sample_is_named_with_the_way_out(name, kind, how, whole):
    batch = next(number for _, number, _, found in whole if 6 in found)
    made = loader(kind(how, 6), plan_of(name, how), skip_ids=(22,))
    with pytest.raises(DataError) as caught:
        taken(made)
    told = str(caught.value)
    assert told.startswith(f"{kind.__name__}: training sample 6 could not be loaded (epoch 0, batch ")
    assert REASONS[how] in told
    assert "Set loader.skip_ids=[22,6], or repair it. loader.max_skipped=1 leaves out what fails." in told
    if how == "raise":
        assert type(caught.value.__cause__) is OSError
        assert str(caught.value.__cause__) == "truncated"
    state = made.state_dict()
    assert f"(epoch 0, batch {state['batch']})" in told  # the batch is still to come
    assert abs(state["batch"] - batch) <= 1  # index 22 is skipped, so batches move a little


@pytest.mark.parametrize(("name", "kind", "how"), MARKED, ids=named)
def test_with_max_skipped_the_step_has_fewer_samples_and_all_else_stays(name, kind, how, whole, caplog):
    bad = [6] if how == "hang" else [6, 15]
    events = []
    made = loader(
        kind(how, *bad), plan_of(name, how), max_skipped=2, on_event=lambda kind, **facts: events.append(facts)
    )
    with caplog.at_level(logging.WARNING):
        assert taken(made, 2) == without(whole, *bad)
    assert sorted(event["index"] for event in events) == bad  # once each, though there are two epochs
    for event in events:
        assert REASONS[how] in event["reason"]
        assert event["index"] in next(found for e, b, _, found in whole if (e, b) == (event["epoch"], event["batch"]))
        warned = [text for text in caplog.messages if f"training sample {event['index']} is left out" in text]
        assert len(warned) == 1


@pytest.mark.parametrize("name", ["inline", "threads", "processes", "torch-1"])
def test_one_more_than_max_skipped_is_an_error_naming_all(name):
    made = loader(sets.Breaking("raise", 3, 9, 14), plan_of(name), max_skipped=2, shuffle=False)
    with pytest.raises(DataError) as caught:
        taken(made)
    told = str(caught.value)
    assert "3 training samples could not be loaded, and loader.max_skipped=2 allows no more" in told
    assert "Before: 3: OSError: truncated" in told
    assert "; 9: OSError" in told
    assert "Now 14 (epoch 0, batch 3): OSError" in told
    assert "Set loader.skip_ids=[3,9,14], or repair them." in told
    assert made.state_dict() == {"epoch": 0, "batch": 3, "skipped": [3, 9]}


@pytest.mark.parametrize("name", ["inline", "threads", "processes", "torch-1"])
def test_several_bad_samples_in_one_batch_are_all_found(name):
    made = loader(sets.Breaking("raise", 1, 2), plan_of(name), max_skipped=2, shuffle=False)
    assert list(taken(made)[0][3]) == [0, 3]
    made = loader(sets.Breaking("raise", 1, 2, 3), plan_of(name), max_skipped=2, shuffle=False)
    with pytest.raises(DataError, match=r"skip_ids=\[1,2,3\]"):
        taken(made)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("threads", sets.BreakingItems),
        ("processes", sets.Breaking),
        pytest.param("threads", sets.Breaking, marks=pytest.mark.slow),
        pytest.param("processes", sets.BreakingItems, marks=pytest.mark.slow),
    ],
)
def test_several_that_hang_or_kill_in_one_batch_are_left_out(name, kind):
    made = loader(kind("hang", 1, 2), PLANS[name], max_skipped=2, shuffle=False)
    assert list(taken(made)[0][3]) == [0, 3]


def test_the_culprit_in_a_fetch_is_bisected_and_the_rest_is_fetched_at_once():
    asked = []

    class Counting(sets.Breaking):
        def fetch(self, indices, rng):
            asked.append(len(indices))
            return super().fetch(indices, rng)

    made = loader(Counting("raise", 700), LoaderSettings(), batch_size=1024, max_skipped=1, shuffle=False)
    made._order._num_samples = 1024
    made._order.num_kept = made._order.num_batches * 1024
    (only,) = made
    assert only.total == len(only.batch["index"]) == 1023
    assert asked[0] == 1024
    assert asked[-1] == 1023
    assert len(asked) <= 2 + 2 * 10


@pytest.mark.parametrize(("name", "stop"), [*(("inline", n) for n in range(1, 12)), ("threads", 3), ("processes", 8)])
def test_a_resumed_run_leaves_the_same_samples_out(name, stop, whole):
    made, seen = loader(sets.Breaking("raise", 6, 15), plan_of(name), max_skipped=2), []
    while len(seen) < stop:
        for delivery in made:
            seen.append((delivery.epoch, delivery.index, delivery.total, delivery.batch["index"].tolist()))
            if len(seen) == stop:
                break
    state = pickle.loads(pickle.dumps(made.state_dict()))
    made.close()
    told = []
    again = loader(
        sets.Breaking("raise", 6, 15),
        PLANS[name],
        max_skipped=2,
        on_event=lambda kind, **facts: told.append(facts["index"]),
    )
    again.load_state_dict(state)
    while len(seen) < 12:
        seen += [(one.epoch, one.index, one.total, one.batch["index"].tolist()) for one in again]
    again.close()
    assert seen == [(epoch, batch, total, list(found)) for epoch, batch, total, found in without(whole, 6, 15)]
    assert set(told) == {6, 15} - set(state.get("skipped", ()))
    assert again.state_dict()["skipped"] == sorted(
        again.state_dict()["skipped"], key=[*state.get("skipped", ()), *told].index
    )


def test_a_remembered_sample_is_never_asked_for_again():
    made = loader(sets.Breaking("hang", 6), LoaderSettings(), max_skipped=1)  # inline: asking would hang for ever
    made.load_state_dict({"epoch": 0, "batch": 0, "skipped": [6]})
    assert sum(total for *_, total, _ in taken(made)) == sets.SIZE - 1


def test_random_draws_of_a_batch_are_those_of_a_run_that_remembers():
    class Drawing(sets.Breaking):
        def fetch(self, indices, rng):
            return {**super().fetch(indices, rng), "noise": torch.rand(len(indices), generator=rng)}

    found = loader(Drawing("raise", 6), LoaderSettings(), max_skipped=1)
    known = loader(Drawing("raise", 6), LoaderSettings(), max_skipped=1)
    known.load_state_dict({"epoch": 0, "batch": 0, "skipped": [6]})
    assert taken(found) == taken(known)


@pytest.mark.parametrize("name", ["inline", "threads", "processes", "torch"])
def test_a_step_that_has_lost_all_its_samples_is_an_error(name):
    made = loader(sets.Breaking("raise", 5), plan_of(name), batch_size=1, max_skipped=1, shuffle=False)
    with pytest.raises(DataError, match=r"all samples of training batch 5 of epoch 0 are left out.*skip_ids=\[5\]"):
        taken(made)
    made = loader(sets.Breaking("raise", 5), plan_of(name), batch_size=1, max_skipped=1, shuffle=False)
    made.load_state_dict({"epoch": 3, "batch": 4, "skipped": [5]})
    with pytest.raises(DataError, match="training batch 5 of epoch 3"):
        taken(made)
    assert made.state_dict()["batch"] == 5  # the one before it was delivered


class Whole(sets.Fetching):
    def fetch(self, indices, rng):
        if len(indices) > 2:
            raise ValueError("too many at once")
        return super().fetch(indices, rng)


@pytest.mark.parametrize("name", ["inline", "threads", "processes"])
def test_a_fetch_that_fails_for_no_one_samples_sake_keeps_its_error(name):
    with pytest.raises(ValueError, match="too many at once") as caught:
        taken(loader(Whole(), plan_of(name), max_skipped=5))
    text = str(caught.value) + "".join(getattr(caught.value, "__notes__", ()))
    assert "batch 0 of epoch 0 (4 samples); parts of it could be fetched, so no one sample is at fault" in text


@pytest.mark.parametrize("error", [MemoryError(), OSError(28, "No space left"), RuntimeError("can't allocate memory")])
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_machine_ran_out_of_is_no_bad_sample(kind, error):
    class Poor(kind):
        def breaks(self):
            raise error

    with pytest.raises(type(error)):
        taken(loader(Poor("", 6), LoaderSettings(), max_skipped=5))


class FirstTime(sets.BreakingItems):
    """Kills the first worker that comes by, as the kernel does when memory runs out."""

    def __init__(self, flag, how="kill"):
        super().__init__(how, 6)
        self.flag = flag

    def breaks(self):
        if not os.path.exists(self.flag):
            open(self.flag, "w").close()
            super().breaks()


def test_a_worker_killed_at_a_sample_that_is_sound_blames_no_sample(tmp_path):
    with pytest.raises(WorkerLost, match=r"killed by SIGKILL at sample 6 of training batch .* no sample does so alone"):
        taken(loader(FirstTime(str(tmp_path / "flag")), LoaderSettings("processes", 1, 2), max_skipped=3))
    assert WorkerLost.kind == "worker"


@pytest.mark.parametrize("code", [0, 1])
def test_a_worker_that_ends_by_itself_is_not_told_to_lack_memory(tmp_path, code):
    data = FirstTime(str(tmp_path / "flag"), f"exit {code}")
    with pytest.raises(
        WorkerLost, match=f"ended by itself with exit code {code} at sample 6 of training batch"
    ) as caught:
        taken(loader(data, LoaderSettings("processes", 1, 2), max_skipped=3))
    assert "os._exit" in str(caught.value)
    assert "memory" not in str(caught.value)
    assert caught.value.kind == "data"


class Unsent:
    """Fails when a worker sends it, as a batch does for which /dev/shm has no room."""

    def __init__(self, reason):
        self.reason = reason

    def __reduce__(self):
        raise RuntimeError(self.reason)


class WithUnsent(sets.Fetching):
    """One batch can't be sent."""

    def __init__(self, reason):
        self.reason = reason

    def fetch(self, indices, rng):
        batch = super().fetch(indices, rng)
        return {**batch, "unsent": Unsent(self.reason)} if 6 in indices.tolist() else batch


NO_ROOM = "unable to write to file </torch_12_34>: No space left on device (28)"


@pytest.mark.parametrize("purpose", ["training", "evaluation"])
@pytest.mark.parametrize(
    ("reason", "said"),
    [
        (NO_ROOM, r"/dev/shm has no room for the {} batch .*No space left.*--shm-size"),
        ("no", "A worker could not send the {} batch that it has built: RuntimeError: no. "),
    ],
)
def test_a_batch_that_cannot_be_sent_is_an_error_and_not_waited_for(purpose, reason, said):
    data, settings = WithUnsent(reason), LoaderSettings("processes", 2, 2)
    made = loader(data, settings) if purpose == "training" else EvalLoader(data, 4, seed=1, settings=settings)
    with ended_after(60), pytest.raises(WorkerLost, match=said.format(purpose)):
        list(made)
    made.close()


class Counted(sets.Fetching):
    def __init__(self):
        self.fetched = multiprocessing.Value("i", 0)

    def fetch(self, indices, rng):
        self.fetched.value += 1
        return super().fetch(indices, rng)


def test_a_worker_killed_between_batches_is_told_with_the_way_out(monkeypatch):
    data = Counted()
    made = loader(data, LoaderSettings("processes", 1, 1))
    handler = signal.getsignal(signal.SIGCHLD)
    monkeypatch.setattr(torch.utils.data._utils.signal_handling, "_SIGCHLD_handler_set", False)
    delivered = iter(made)
    next(delivered)
    assert signal.getsignal(signal.SIGCHLD) is handler  # torch's would raise in the midst of a step
    for process in multiprocessing.active_children():
        while data.fetched.value < 2 or made._source._processes._heartbeats[0].activity() is not None:
            pass  # the second batch was asked for with the first
        os.kill(process.pid, signal.SIGKILL)
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            pass  # no error here
    with pytest.raises(WorkerLost, match=r"SIGKILL while it was at no sample: .* Set fewer loader.num_workers"):
        list(delivered)
    made.close()


def test_a_slow_batch_is_no_hanging_sample():
    class Slow(sets.BreakingItems):
        def breaks(self):
            threading.Event().wait(0.08)

    for name in ("threads", "processes"):
        made = loader(Slow("", *range(20)), PLANS[name], batch_size=20, max_skipped=3)
        with pytest.raises(DataError, match=r"No batch came within loader\.timeout_s=0\.25 s"):
            taken(made)


class Stubborn(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


class WithStubborn(sets.BreakingItems):
    def breaks(self):
        raise Stubborn("not", "picklable")


def test_an_exception_that_does_not_pickle_reaches_the_message():
    with pytest.raises(DataError, match="Stubborn: not picklable") as caught:
        taken(loader(WithStubborn("", 6), PLANS["processes"]))
    cause = caught.value.__cause__
    assert type(cause) is RuntimeError
    assert "in breaks" in cause.__notes__[0]  # the worker's traceback


class Turning(KeyError):
    """Pickles as something that is no exception."""

    def __reduce__(self):
        return str, ("no exception",)


class WithTurning(sets.BreakingItems):
    def breaks(self):
        raise Turning("gone")


def test_an_exception_that_pickles_as_something_else_reaches_the_message():
    with pytest.raises(DataError, match="Turning: 'gone'") as caught:
        taken(loader(WithTurning("", 6), PLANS["processes"]))
    assert "in breaks" in caught.value.__cause__.__notes__[0]


def test_the_way_out_of_many_stays_readable():
    bad = BadSamples("Set", LoaderSettings(skip_ids=tuple(range(30))))
    with pytest.raises(DataError) as caught:
        bad.take([LostSample(77, "broken")], 0, 0)
    assert "Set loader.skip_ids to what it is, and 77, or repair it." in str(caught.value)


def test_ranks_cannot_skip():
    with pytest.raises(ValueError, match="max_skipped needs one rank"):
        loader(sets.Fetching(), LoaderSettings(), max_skipped=1, world_size=2)
    made = loader(sets.Breaking("raise", *range(23)), LoaderSettings(), world_size=2)
    with pytest.raises(DataError) as caught:
        taken(made)
    assert "max_skipped" not in str(caught.value)


def test_workers_take_their_row_and_no_other():
    made = loader(sets.Fetching(), LoaderSettings("processes", 2, 2, persistent_workers=True))
    list(made)
    heartbeats = made._source._processes._heartbeats
    assert {heartbeats[0].pid, heartbeats[1].pid} == {process.pid for process in made._source._processes._processes}
    assert heartbeats[0].activity() is heartbeats[1].activity() is None
    made.close()
    assert process_backend._LOOK_S < 5  # torch's own look


def test_a_sample_that_hangs_when_it_is_tried_alone_is_not_waited_for_for_ever(monkeypatch, tmp_path):
    monkeypatch.setattr(process_backend, "_ALONE_S", 0.3)
    made = loader(sets.HangingAlone(6, tmp_path / "pid"), LoaderSettings("processes", 1, 2))
    with ended_after(20), pytest.raises(WorkerLost, match=r"at sample 6 of .*, but no sample does so alone"):
        taken(made)
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


DIES = """
import sys
from pathlib import Path
from tests.loading import sets
from wellfed.data.settings import LoaderSettings
from wellfed.data.train_loader import train_loader

list(train_loader(sets.HangingAlone(6, Path(sys.argv[1])), LoaderSettings("processes", 1, 2), batch_size=4, seed=1))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone ends a process with its parent")
def test_what_tries_a_sample_alone_ends_with_the_training_process(tmp_path):
    told = tmp_path / "pid"
    source = {**os.environ, "PYTHONPATH": f"{Path(wellfed.__file__).parents[1]}{os.pathsep}{ROOT}"}
    training = subprocess.Popen([sys.executable, "-c", DIES, str(told)], env=source)
    try:
        until_s = time.monotonic() + 60
        while not (told.exists() and told.read_text()) and time.monotonic() < until_s:
            time.sleep(0.02)
        alone = psutil.Process(int(told.read_text()))
    finally:
        training.kill()
        training.wait()
    gone, left = psutil.wait_procs([alone], timeout=10)
    for process in left:
        process.kill()
    assert gone == [alone]


def test_cuda_in_a_worker_is_no_samples_fault():
    """Also where samples may fail: to leave them out one after the other would be a way into nothing."""
    reason = "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, ..."
    bad = BadSamples("Data", LoaderSettings(max_skipped=5))
    with pytest.raises(DataError, match=r"^Data: uses CUDA in a worker process.*loader.backend=inline") as raised:
        bad.take([LostSample(21, reason)], 0, 0)
    assert "skip_ids" not in str(raised.value)
    assert bad.indices == []
    assert str(evaluation_error("Data", LostSample(21, reason), 0)) == str(raised.value)


class Holding(WithUnsent):
    """Its worker holds the lock of the event by which torch ends workers, as one that is killed there does."""

    def fetch(self, indices, rng):
        if 6 in indices.tolist():
            frame = sys._getframe()
            while "done_event" not in frame.f_locals:
                frame = frame.f_back
            frame.f_locals["done_event"]._cond.acquire()
        return super().fetch(indices, rng)


def test_a_worker_that_dies_with_the_lock_of_torchs_event_is_not_waited_for():
    made = loader(Holding("no"), LoaderSettings("processes", 1, 1))
    with ended_after(30):
        with pytest.raises(WorkerLost):
            list(made)
        made.close()
        gc.collect()
