"""Runs an estimate in a forked copy of this process: what the model's code keeps, draws, prints or ends stays there."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from wellfed import generators
from wellfed.footprint.footprint import Footprint, NoEstimate
from wellfed.forking import MAY_FORK, exit_code, fork, leave

Found = Footprint | NoEstimate
_STOP = (signal.SIGINT, signal.SIGTERM)


def apart(work: Callable[[], Found]) -> Found:
    """What ``work`` finds, in a child process where one can be forked; blocks until it ends.

    A child that ends in another way (``sys.exit``, a crash, the system's out-of-memory killer) is a `NoEstimate`. What
    interrupts this process ends the child too, and goes on.
    """
    found = _in_child(work) if MAY_FORK else None
    return _in_process(work) if found is None else found


def _in_process(work: Callable[[], Found]) -> Found:
    """Random states are put back; caches of the model's module keep what they were given."""
    with generators.kept(torch.device("cpu")):
        try:
            return work()
        except SystemExit as ended:
            return NoEstimate(_ended(exit_code(ended)))


def _in_child(work: Callable[[], Found]) -> Found | None:
    """None: no process could be forked, or torch can't be used in it."""
    reading, writing = os.pipe()
    # A signal that the child gets before it has let go of this process's handlers would run them there.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP)
    try:
        child = fork()
    except OSError:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(reading)
        os.close(writing)
        return None
    if child == 0:
        os.close(reading)
        _answer(work, writing, mask)
    try:
        os.close(writing)
        with open(reading, encoding="utf-8") as answers:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            text = answers.read()
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        _, status = os.waitpid(child, 0)
    try:
        return _heard(json.loads(text))
    except ValueError:  # nothing, or not all of it
        return NoEstimate(_ended(os.waitstatus_to_exitcode(status)))


def _answer(work: Callable[[], Found], writing: int, mask: set[int | signal.Signals]) -> NoReturn:
    """The child's whole life. Leaves without the handlers that this process was given for its end."""
    code = 1
    try:
        for number in _STOP:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        gc.freeze()  # what was dropped before the fork is finalised by the other process alone
        with contextlib.suppress(OSError):  # no stderr
            os.dup2(2, 1)
        sys.stdout = sys.stderr
        torch.set_num_threads(1)  # OpenMP's threads stayed behind, and it would wait for them
        answer = json.dumps(_told(work))
        with open(writing, "w", encoding="utf-8") as answers:
            answers.write(answer)
        code = 0
    except SystemExit as ended:
        code = exit_code(ended)
    finally:
        leave(code)


def _told(work: Callable[[], Found]) -> dict[str, Any]:
    try:
        torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
    except RuntimeError:  # a backward pass on a GPU came before the fork: its threads are missing
        return {"cant": True}
    try:
        found = work()
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001  told to the other process, and gone with this one
        found = NoEstimate(f"{type(error).__name__}: {error}".splitlines()[0])
    return {"footprint": found.to_dict()} if isinstance(found, Footprint) else {"reason": found.reason}


def _heard(answer: dict[str, Any]) -> Found | None:
    if "cant" in answer:
        return None
    return NoEstimate(answer["reason"]) if "reason" in answer else Footprint.from_dict(answer["footprint"])


def _ended(code: int) -> str:
    """A negative code is a signal's number."""
    how = f"exit code {code}" if code >= 0 else f"signal {-code} ({signal.Signals(-code).name})"
    return f"the rehearsal of a step ended with {how}"
