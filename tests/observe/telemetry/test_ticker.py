import threading

import pytest

from tests.kit.watched import until
from wellfed.observe.telemetry.ticker import Ticker, next_beat


def test_the_next_beat_is_the_first_one_after_now():
    assert next_beat(10.0, 10.0, 0.5) == 10.5
    assert next_beat(10.0, 11.2, 0.5) == 11.5  # missed beats are skipped
    assert next_beat(10.0, 3.0, 0.5) == 10.0
    for number in range(1, 200):  # whole numbers of intervals, where rounding decides
        now_s = 5.0 + 0.3 * number
        assert 0 < next_beat(5.0, now_s, 0.3) - now_s <= 0.3 + 1e-6


def test_a_late_round_does_not_shift_the_next(monkeypatch):
    now_s, began_at_s = [100.0], []

    def a_round():
        began_at_s.append(now_s[0])
        now_s[0] += 0.025  # 2.5 intervals
        if len(began_at_s) == 5:
            ticker.stop()

    def wait(self, timeout):
        now_s[0] += timeout
        return False

    ticker = Ticker("test", 0.01, a_round, lambda: None, now_s=lambda: now_s[0])
    monkeypatch.setattr(threading.Condition, "wait", wait)
    ticker._run()
    assert began_at_s == pytest.approx([100.0, 100.03, 100.06, 100.09, 100.12])


def test_a_nudge_is_a_round_now_and_stopping_ends_a_wait():
    rounds, ended_in = [], []
    ticker = Ticker("test", 600, lambda: rounds.append(1), lambda: ended_in.append(threading.current_thread()))
    ticker.start()
    until(lambda: len(rounds) == 1)
    ticker.nudge()
    until(lambda: len(rounds) == 2)
    ticker.stop()
    assert ticker.join(20)
    assert ended_in == [ticker._thread]


def test_a_round_that_hangs_holds_nobody_up():
    gate = threading.Event()
    ticker = Ticker("test", 600, lambda: gate.wait(30), lambda: None)
    ticker.start()
    ticker.stop()
    assert not ticker.join(0.02)
    assert ticker._thread.daemon
    gate.set()
    assert ticker.join(20)
