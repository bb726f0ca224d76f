import contextlib
import os
import signal

import pytest

from wellfed.process import Stopped, StopRequest


def test_while_stepping_the_first_signal_waits_and_the_second_does_not() -> None:
    with StopRequest().listening() as request:
        request.is_stepping = True
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.signum == signal.SIGTERM
        with pytest.raises(Stopped) as caught:
            os.kill(os.getpid(), signal.SIGINT)
    assert caught.value.signum == signal.SIGINT
    assert request.signum == signal.SIGTERM  # the first is what the run ended by


def test_one_that_is_lost_on_its_way_is_remembered() -> None:
    with StopRequest().listening() as request:
        with contextlib.suppress(Stopped):  # as a __del__ would swallow it
            os.kill(os.getpid(), signal.SIGTERM)
        assert request.signum == signal.SIGTERM


def test_while_the_record_is_written_nothing_raises_and_afterwards_neither() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    try:
        with StopRequest().listening() as request:
            request.signum = signal.SIGINT
            request.is_finishing = True
            os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)
    assert request.signum == signal.SIGINT


def test_a_hangup_that_is_ignored_stays_so() -> None:
    """As under nohup; any other handler gives way."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest().listening() as request:
            os.kill(os.getpid(), signal.SIGHUP)
            assert request.signum is None
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with StopRequest().listening() as request, contextlib.suppress(Stopped):
            os.kill(os.getpid(), signal.SIGHUP)
        assert request.signum == signal.SIGHUP
    finally:
        signal.signal(signal.SIGHUP, before)
