import numpy as np

from tests.kit.seen import board_of, sample, seen
from wellfed.monitor import board as module
from wellfed.monitor.board import Curve


def curve_of(*readings):
    curve = Curve()
    for time_s, value in readings:
        curve.add(time_s, value)
    return curve


def test_a_curve_keeps_its_latest_readings(monkeypatch):
    monkeypatch.setattr(module, "KEPT_READINGS", 10)
    times_s, values = curve_of(*((float(second), 2.0 * second) for second in range(45))).arrays()
    assert 10 <= len(times_s) <= 20
    np.testing.assert_array_equal(times_s, np.arange(45 - len(times_s), 45))
    np.testing.assert_array_equal(values, 2 * times_s)


def test_a_figure_that_the_driver_gives_no_more_is_left_out():
    board = board_of(seen(0))
    board.add([sample(0.0, 0, {"util_pct": 10, "power_w": 100})])
    board.add([sample(15.0, 0, {"util_pct": 20})])
    assert board.latest(0) == {"util_pct": 20, "power_w": 100}
    board.add([sample(15.5, 0, {"util_pct": 30})])
    assert board.latest(0) == {"util_pct": 30}


def test_the_curve_of_an_instance_is_that_of_its_multiprocessors():
    instance = seen(1, is_mig=True)
    board = board_of(instance)
    board.add([sample(0.0, 1, {"sm_active_pct": 40, "mem_used_gib": 1})])
    assert list(board.curve(1)[1]) == [40]


def test_mean_peak_and_energy_of_a_gpu():
    board = board_of(seen(0))
    for second, util_pct in enumerate((0, 50, 100)):
        board.add([sample(float(second), 0, {"util_pct": util_pct, "energy_j": 100.0 * second})])
    figures = board.figures(0)
    assert (figures["util_pct"]["mean"], figures["util_pct"]["max"], figures["energy_j"]) == (50, 100, 200)


def test_a_gpu_that_is_lost_or_silent_is_said_to_be():
    board = board_of(seen(0), seen(1))
    board.add([sample(1.0, 0, {"util_pct": 10}), sample(1.0, 1, {"util_pct": 10})])
    assert board.trouble(0, 5.9) is None
    assert board.trouble(0, 8.2) == "no reading for 7 s"
    board.lose(1)
    assert board.latest(1) == {}
    assert board.trouble(1, 1.0).startswith("lost")
