import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.watched import until
from wellfed.observe.telemetry.ticker import Ticker, next_beat


class Rounds:
    """A ticker and what it did; the clock moves by ``takes_s`` a round and no further."""

    def __init__(self, interval_s, takes_s=0.0):
        self.now_s, self._takes_s = 100.0, takes_s
        self.began_at_s, self.ended_in = [], []
        self.gate = threading.Event()
        self.gate.set()
        self.ticker = Ticker("test", interval_s, self._round, self._end, now_s=lambda: self.now_s)

    def _round(self):
        self.began_at_s.append(self.now_s)
        self.now_s += self._takes_s
        self.gate.wait(30)

    def _end(self):
        self.ended_in.append(threading.current_thread())

    def __enter__(self):
        self.ticker.start()
        return self

    def __exit__(self, *error):
        self.gate.set()
        self.ticker.stop()
        assert self.ticker.join(20)


@given(
    beat_s=st.floats(0, 1e6),
    interval_s=st.one_of(st.sampled_from([0.1, 0.3, 0.5, 0.7]), st.floats(0.1, 600)),
    later=st.one_of(st.floats(0, 1e5), st.integers(0, 10_000)),
)
def test_the_next_beat_is_the_first_one_after_now(beat_s, interval_s, later):
    # Whole numbers are exact beats, where rounding decides.
    now_s = beat_s + (later * interval_s if isinstance(later, int) else later)
    next_s = next_beat(beat_s, now_s, interval_s)
    assert next_s > now_s
    assert next_s - now_s <= interval_s + 1e-6
    beats = (next_s - beat_s) / interval_s
    assert beats == pytest.approx(round(beats), abs=1e-4)
    assert round(beats) >= 1


@given(beat_s=st.floats(0, 1e6), early_s=st.floats(1e-3, 100), interval_s=st.floats(0.1, 600))
def test_a_beat_that_is_yet_to_come_is_the_next(beat_s, early_s, interval_s):
    assert next_beat(beat_s, beat_s - early_s, interval_s) == beat_s


def test_rounds_come_at_a_steady_beat():
    began_at_s = []
    ticker = Ticker("test", 0.02, lambda: began_at_s.append(time.monotonic()), lambda: None)
    ticker.start()
    until(lambda: len(began_at_s) >= 6)
    ticker.stop()
    assert ticker.join(20)
    # However late one is, it is never early: all lie at or after their beats.
    assert all((at_s - began_at_s[0]) / 0.02 >= number - 0.1 for number, at_s in enumerate(began_at_s))


def test_a_late_round_does_not_shift_the_next_and_missed_beats_are_skipped(monkeypatch):
    # Rounds take 2.5 intervals; waiting is done by the clock alone.
    rounds = Rounds(0.01, takes_s=0.025)

    def wait(self, timeout):
        rounds.now_s += timeout
        return False

    monkeypatch.setattr(threading.Condition, "wait", wait)
    stop_after(rounds, 5)
    assert rounds.began_at_s == pytest.approx([100.0, 100.03, 100.06, 100.09, 100.12])


def stop_after(rounds, num):
    """Runs the ticker's loop in this thread for so many rounds."""
    do_round = rounds.ticker._do_round

    def count():
        do_round()
        if len(rounds.began_at_s) == num:
            rounds.ticker.stop()

    rounds.ticker._do_round = count
    rounds.ticker._run()


def test_a_nudge_is_a_round_now_and_one_during_a_round_is_not_lost():
    with Rounds(600) as rounds:
        until(lambda: len(rounds.began_at_s) == 1)
        rounds.gate.clear()
        rounds.ticker.nudge()
        until(lambda: len(rounds.began_at_s) == 2)
        rounds.ticker.nudge()
        rounds.gate.set()
        until(lambda: len(rounds.began_at_s) == 3)
    assert len(rounds.began_at_s) == 3


def test_stopping_ends_a_wait_and_the_end_runs_in_the_thread():
    with Rounds(600) as rounds:
        until(lambda: rounds.began_at_s)
        assert rounds.ended_in == []
    assert rounds.ended_in == [rounds.ticker._thread]
    assert len(rounds.began_at_s) == 1


def test_stopped_before_its_first_round_it_does_none():
    rounds = Rounds(600)
    rounds.ticker.stop()
    with rounds:
        pass
    assert rounds.began_at_s == []
    assert len(rounds.ended_in) == 1


def test_a_round_that_hangs_holds_nobody_up():
    with Rounds(600) as rounds:
        rounds.gate.clear()
        rounds.ticker.nudge()
        until(lambda: len(rounds.began_at_s) == 2)
        rounds.ticker.stop()
        began_at_s = time.monotonic()
        assert not rounds.ticker.join(0.02)
        assert time.monotonic() - began_at_s < 10
        assert rounds.ended_in == []
        rounds.now_s += 7
        assert rounds.ticker.busy_s() == 7.0
        assert rounds.ticker._thread.daemon
    assert rounds.ticker.busy_s() == 0.0


def test_an_end_that_hangs_shows():
    gate = threading.Event()
    ticker = Ticker("test", 600, lambda: None, lambda: gate.wait(30), now_s=time.monotonic)
    ticker.start()
    ticker.stop()
    until(lambda: ticker.busy_s() > 0.01)
    assert not ticker.join(0)
    gate.set()
    assert ticker.join(20)
    assert ticker.busy_s() == 0.0


def test_cpu_time_is_the_threads_own():
    def burn():
        until_s = time.thread_time() + 0.02
        while time.thread_time() < until_s:
            pass

    with Rounds(600) as idle:
        burn()
        until(lambda: idle.began_at_s)
    assert 0 <= idle.ticker.cpu_s < 0.02
    busy = Ticker("test", 600, burn, lambda: None)
    busy.start()
    until(lambda: busy.cpu_s >= 0.02)
    busy.stop()
    assert busy.join(20)
    ending = Ticker("test", 600, lambda: None, burn)
    ending.start()
    ending.stop()
    assert ending.join(20)
    assert ending.cpu_s >= 0.02
