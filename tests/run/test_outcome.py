import errno
import signal
import typing

import pytest
import torch

from wellfed import errors
from wellfed.errors import ConfigError, DataError, DoesNotFit, Fault, OutOfMemoryExhausted, WellfedError
from wellfed.process import Stopped
from wellfed.record.entries import Status
from wellfed.run.outcome import outcome_of
from wellfed.train.step.non_finite import NonFiniteLoss


def noted(error, *notes):
    for note in notes:
        error.add_note(note)
    return error


WORKER_BUG = (
    'Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback:\n  File "data.py"\nRuntimeError: bug'
)
SHM = (
    "Caught RuntimeError in DataLoader worker process 1.\nOriginal Traceback:\n"
    "RuntimeError: unable to write to file </torch_12_34_5>: No space left on device (28)\n"
)
EXITED = "DataLoader worker (pid 7) exited unexpectedly with exit code 3. Details are lost."
TABLE = [
    # error, status, kind, exit code after training began, exit code before, a traceback is needless
    (Stopped(signal.SIGINT), "interrupted", None, 130, 130, True),
    (Stopped(signal.SIGTERM), "interrupted", None, 143, 143, True),
    (KeyboardInterrupt(), "interrupted", None, 130, 130, True),
    (OutOfMemoryExhausted("tried all"), "oom", "device_oom", 3, 3, True),
    (OutOfMemoryExhausted("tried all", "host_oom"), "oom", "host_oom", 3, 3, True),
    (torch.OutOfMemoryError("CUDA out of memory."), "oom", "device_oom", 3, 3, True),
    (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"), "failed", "code", 1, 2, False),
    (MemoryError(), "oom", "host_oom", 3, 3, True),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), "oom", "host_oom", 3, 3, True),
    (NonFiniteLoss("loss is nan"), "failed", "code", 1, 1, True),
    (ConfigError([Fault("a", "b", "c")]), "failed", "config", 1, 2, True),
    (DoesNotFit([Fault("a", "b", "c")]), "infeasible", "device_oom", 3, 3, True),
    (DataError("no file"), "failed", "data", 1, 2, True),
    (WellfedError("other"), "failed", "code", 1, 2, True),
    (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), "failed", "worker", 1, 2, True),
    (RuntimeError("DataLoader worker (pid(s) 7, 8) exited unexpectedly"), "failed", "worker", 1, 2, True),
    (RuntimeError(EXITED), "failed", "data", 1, 2, True),
    (RuntimeError(SHM), "failed", "worker", 1, 2, True),
    (RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. "), "failed", "worker", 1, 2, True),
    (RuntimeError("CUDA error: device-side assert triggered"), "failed", "code", 1, 2, False),
    (RuntimeError(WORKER_BUG), "failed", "code", 1, 2, False),
    (OSError(errno.ENOSPC, "No space left on device"), "failed", "disk", 1, 2, True),
    (OSError(errno.EDQUOT, "Disk quota exceeded"), "failed", "disk", 1, 2, True),
    (FileNotFoundError(errno.ENOENT, "No such file"), "failed", "code", 1, 2, False),
    (ValueError("bug"), "failed", "code", 1, 2, False),
    (SystemExit(0), "failed", "code", 1, 2, False),
]


@pytest.mark.parametrize(("error", "status", "kind", "after", "before", "is_expected"), TABLE, ids=repr)
def test_what_an_exception_means(error, status, kind, after, before, is_expected):
    for has_trained, code in ((True, after), (False, before)):
        found = outcome_of(error, has_trained=has_trained)
        assert (found.status, found.kind, found.exit_code) == (status, kind, code)
        assert found.is_expected is is_expected
        assert found.message or isinstance(error, KeyboardInterrupt)
        assert found.status in typing.get_args(Status)
        assert found.kind is None or found.kind in typing.get_args(errors.ErrorKind)


def test_what_leaves_no_folder():
    faults = [Fault("a", "b", "c")]
    before = {error: outcome_of(error, has_trained=False) for error in (ConfigError(faults), DoesNotFit(faults))}
    assert all(outcome.is_refusal for outcome in before.values())
    assert not outcome_of(ConfigError(faults), has_trained=True).is_refusal
    assert not outcome_of(torch.OutOfMemoryError("CUDA out of memory."), has_trained=False).is_refusal
    assert str(DoesNotFit(faults)) == "Memory does not suffice; nothing was run.\n  - a: b c"


def test_the_line_that_tells_is_the_message_of_a_lost_worker():
    found = outcome_of(RuntimeError(SHM), has_trained=True)
    assert found.message == "RuntimeError: unable to write to file </torch_12_34_5>: No space left on device (28)"
    assert "loader.num_workers" in found.advice


class Broken(torch.utils.data.Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        raise KeyError("label")


def test_an_error_in_a_users_worker_is_its_own_last_line():
    with pytest.raises(KeyError) as raised:
        next(iter(torch.utils.data.DataLoader(Broken(), num_workers=1)))
    assert outcome_of(raised.value, has_trained=True).message == "KeyError: 'label' (in DataLoader worker process 0)"


GONE = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:3969."


def test_a_connection_that_breaks_is_the_end_of_another_rank(tmp_path):
    assert not outcome_of(RuntimeError(GONE), has_trained=True).is_expected  # it trains alone: a bug of other code
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        found = outcome_of(RuntimeError(GONE), has_trained=True)
        own = outcome_of(RuntimeError("CUDA error: unspecified launch failure"), has_trained=True)
    finally:
        torch.distributed.destroy_process_group()
    assert (found.is_of_other_rank, found.is_expected, found.exit_code) == (True, True, 1)
    assert "Another rank has ended" in found.message
    assert not own.is_of_other_rank
