import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.seen import board_of, sample, seen
from wellfed.monitor import board as module
from wellfed.monitor.board import Curve
from wellfed.observe.telemetry.machines import HOST


def curve_of(*readings):
    curve = Curve()
    for time_s, value in readings:
        curve.add(time_s, value)
    return curve


def test_a_cell_is_the_mean_of_its_second_and_the_one_under_way_waits():
    curve = curve_of((0.0, 10), (0.5, 30), (1.0, 50), (1.5, 70), (2.0, 90))
    assert curve.cells(2.2, 1.0, 3) == [None, 20, 60]
    assert curve.cells(3.0, 1.0, 3) == [20, 60, 90]
    assert curve.cells(4.0, 2.0, 2) == [40, 90]


def test_one_empty_cell_has_the_value_before_it_and_a_longer_gap_is_a_gap():
    curve = curve_of((0.5, 10), (2.5, 30), (6.5, 50))
    assert curve.cells(9.0, 1.0, 9) == [10, 10, 30, None, None, None, 50, None, None]


def test_a_curve_without_readings_and_one_of_long_ago_are_empty():
    assert Curve().cells(100.0, 1.0, 3) == [None, None, None]
    assert curve_of((1.0, 5)).cells(100.0, 1.0, 3) == [None, None, None]


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), max_size=50), st.integers(1, 70), st.floats(0, 120))
def test_there_are_as_many_cells_as_asked_for_within_what_was_read(readings, num, now_s):
    curve = curve_of(*sorted(readings))
    cells = curve.cells(now_s, 1.0, num)
    assert len(cells) == num
    values = [value for _, value in readings]
    assert all(min(values) - 1e-9 <= cell <= max(values) + 1e-9 for cell in cells if cell is not None)


def test_a_curve_keeps_its_latest_readings(monkeypatch):
    monkeypatch.setattr(module, "KEPT_READINGS", 10)
    times_s, values = curve_of(*((float(second), 2.0 * second) for second in range(45))).arrays()
    assert 10 <= len(times_s) <= 20
    np.testing.assert_array_equal(times_s, np.arange(45 - len(times_s), 45))
    np.testing.assert_array_equal(values, 2 * times_s)


def test_figures_that_are_read_less_often_stay_beside_the_latest():
    board = board_of(seen(0), seen(1))
    board.add([sample(0.0, 0, {"util_pct": 10, "power_w": 100}), sample(0.0, 1, {"util_pct": 90})])
    board.add([sample(0.5, 0, {"util_pct": 20})])
    assert board.latest(0) == {"util_pct": 20, "power_w": 100}
    assert board.latest(1) == {"util_pct": 90}
    assert board.latest(7) == {}
    assert [list(of) for of in board.curve(0)] == [[0.0, 0.5], [10.0, 20.0]]


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


def test_cpu_time_is_a_share_of_all_cores_and_ticks_make_it_no_more():
    board = board_of(num_cores=4)
    board.add([sample(0.0, HOST, {"cpu_pct": 200, "mem_used_gib": 3}), sample(0.5, HOST, {"cpu_pct": 404})])
    assert board.latest(HOST) == {"cpu_pct": 100, "mem_used_gib": 3}
    assert (board.host_figures()["cpu_pct"]["mean"], board.host_figures()["cpu_pct"]["max"]) == (75, 100)
    assert board.cells(HOST, 1.0, 1.0, 1) == [75]


def test_mean_peak_and_energy_of_a_gpu():
    board = board_of(seen(0))
    for second, util_pct in enumerate((0, 50, 100)):
        board.add([sample(float(second), 0, {"util_pct": util_pct, "energy_j": 100.0 * second})])
    figures = board.gpu_figures(2.0)["0"]
    assert (figures["util_pct"]["mean"], figures["util_pct"]["max"], figures["energy_j"]) == (50, 100, 200)


def test_a_gpu_that_is_lost_or_silent_is_said_to_be():
    board = board_of(seen(0), seen(1))
    board.add([sample(1.0, 0, {"util_pct": 10}), sample(1.0, 1, {"util_pct": 10})])
    assert board.trouble(0, 5.9) is None
    assert board.trouble(0, 8.2) == "no reading for 7 s"
    board.lose(1)
    assert board.latest(1) == {}
    assert board.trouble(1, 1.0).startswith("lost")
    board.regain(1)
    assert board.trouble(1, 1.0) is None


def test_threads_that_read_do_not_trip_the_one_that_shows(at_once):
    board = board_of(seen(0))
    at_once(
        50,
        lambda number: board.add([sample(number / 10, 0, {"util_pct": 1, f"m{number}": 1})]),
        lambda number: (board.latest(0), board.cells(0, 20.0, 1.0, 60), board.curve(0), board.gpu_figures(1.0)),
    )
    assert board.gpu_figures(20.0)["0"]["util_pct"]["n"] == 50
