"""Runs an estimate in a forked child process, to contain side effects of the model's code."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import selectors
import signal
import sys
from collections.abc import Callable
from typing import BinaryIO, NoReturn

import torch

from wellfed import generators
from wellfed.errors import text_of
from wellfed.plan.predict.peak import Footprint, NoEstimate
from wellfed.process import MAY_FORK, end_by_signals, exit_code, fork, held_signals, leave

_LOG = logging.getLogger(__name__)
Found = Footprint | NoEstimate
_POLL_S = 0.1


def in_fork(work: Callable[[], Found]) -> Found:
    """Returns the result of ``work``, from a child process if forking is possible. Blocks until it ends.

    A child that ends without a result (``sys.exit``, a crash, the system's out-of-memory killer) gives a `NoEstimate`.
    An interrupt of this process ends the child too, and is raised. Without a child, random states are restored, but
    caches in the model's modules change.
    """
    if MAY_FORK and (found := _in_child(work)) is not None:
        return found
    with generators.kept():
        try:
            return work()
        except SystemExit as ended:
            return _ended(exit_code(ended))


def _in_child(work: Callable[[], Found]) -> Found | None:
    """Runs ``work`` in a child.

    Returns None if forking fails, if torch does not work in the child, or if the child has no estimate and this process
    has initialised CUDA, which may be the reason.
    """
    reading, writing = os.pipe()
    with open(reading, "rb") as answers, held_signals() as let_through:
        try:
            child = fork()
        except OSError:
            os.close(writing)
            return None
        if child == 0:
            _answer(work, writing, let_through)
        try:
            os.close(writing)
            let_through()
            answer = _read(answers)
        except BaseException:
            os.kill(child, signal.SIGKILL)
            raise
        finally:
            _, status = os.waitpid(child, 0)
    try:
        found: Found | None = pickle.loads(answer)
    except (EOFError, pickle.UnpicklingError):  # no answer, or a part of one
        return _ended(os.waitstatus_to_exitcode(status))
    if isinstance(found, NoEstimate) and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        _LOG.info("No estimate in a child process, so it is tried in this one: %s", found.reason)
        return None
    return found


def _read(answers: BinaryIO) -> bytes:
    """Returns all that comes, and runs handlers of signals meanwhile: another thread may have got the signal, which
    would not interrupt a read."""
    found = b""
    with selectors.DefaultSelector() as selector:
        selector.register(answers, selectors.EVENT_READ)
        while True:
            if selector.select(_POLL_S):
                part = os.read(answers.fileno(), 1 << 16)
                if not part:
                    return found
                found += part


def _answer(work: Callable[[], Found], writing: int, let_through: Callable[[], None]) -> NoReturn:
    """Runs the child to its end, without this process's exit handlers."""
    code = 1
    try:
        end_by_signals()
        let_through()
        with contextlib.suppress(OSError):  # no stderr
            os.dup2(2, 1)
        sys.stdout = sys.stderr
        torch.set_num_threads(1)  # OpenMP would wait for threads that the child lacks
        _hide_cards()
        answer = pickle.dumps(_found(work))
        with open(writing, "wb") as answers:
            answers.write(answer)
        code = 0
    except SystemExit as ended:
        code = exit_code(ended)
    finally:
        leave(code)


def _hide_cards() -> None:
    """Makes torch find no GPU in this process.

    CUDA fails in a fork of a process that initialised it. torch counts the GPUs once, so ``is_available`` would stay
    true, and the step of an optimizer on the CPU would ask CUDA whether its stream is being captured.
    """
    torch.cuda.is_available = lambda: False
    torch.cuda.device_count = lambda: 0
    torch.cuda._initialized = False
    torch.accelerator.is_available = lambda: False
    torch.accelerator.current_accelerator = lambda check_available=False: None


def _found(work: Callable[[], Found]) -> Found | None:
    try:
        torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
    except RuntimeError:  # a backward pass on a GPU ran before the fork, and its threads are missing
        return None
    try:
        return work()
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001  reported to the parent
        return NoEstimate(f"{type(error).__name__}: {text_of(error)}".splitlines()[0])


def _ended(code: int) -> NoEstimate:
    """Returns the reason for a child without an answer. A negative code is a signal's number."""
    how = f"exit code {code}" if code >= 0 else f"signal {-code} ({signal.Signals(-code).name})"
    return NoEstimate(f"the rehearsal of a step ended with {how}")
