"""The monitor's readings, and how they are shown and summed up."""

import io
import re

import numpy as np
import pytest
from rich.console import Console

from tests.kit.seen import board_of, filled_board, sample, seen
from wellfed.observe.machine_facts import Holder
from wellfed.observe.telemetry.series import HOST
from wellfed.watch import board as module
from wellfed.watch.board import Curve
from wellfed.watch.monitor import summary_lines
from wellfed.watch.screens import ASCII_BLOCKS, Screen, plain_line, table


def test_a_curve_keeps_its_latest_readings(monkeypatch):
    monkeypatch.setattr(module, "KEPT_READINGS", 10)
    curve = Curve()
    for second in range(45):
        curve.add(float(second), 2.0 * second)
    times_s, values = curve.arrays()
    assert 10 <= len(times_s) <= 20
    np.testing.assert_array_equal(times_s, np.arange(45 - len(times_s), 45))
    np.testing.assert_array_equal(values, 2 * times_s)


def test_mean_and_peak_cover_readings_that_are_no_more_kept(monkeypatch):
    monkeypatch.setattr(module, "KEPT_READINGS", 10)
    board = board_of(seen(0))
    for second in range(101):
        board.add([sample(float(second), 0, {"util_pct": 100.0 - second})])
    assert board.figures(0) == {"util_pct": {"mean": 50.0, "max": 100.0}}


def test_a_figure_that_the_driver_gives_no_more_is_left_out():
    board = board_of(seen(0))
    board.add([sample(0.0, 0, {"util_pct": 10, "power_w": 100})])
    board.add([sample(15.0, 0, {"util_pct": 20})])
    assert board.latest(0) == {"util_pct": 20, "power_w": 100}
    board.add([sample(15.5, 0, {"util_pct": 30})])
    assert board.latest(0) == {"util_pct": 30}


def test_a_gpu_that_is_silent_is_said_to_be():
    board = board_of(seen(0))
    board.add([sample(1.0, 0, {"util_pct": 10})])
    assert board.trouble(0, 5.9) is None
    assert board.trouble(0, 8.2) == "no reading for 7 s"
    assert plain_line(board, 8.2).startswith("gpu0 no reading for 7 s;")


def shown(board, width=120, **options):
    console = Console(file=io.StringIO(), width=width)
    console.print(table(board, 3.0, " of 60 s", **options))
    return console.file.getvalue()


def test_a_line_has_the_figures_of_each_gpu_and_of_the_host():
    line = plain_line(filled_board(seen(0), seen(1)), 1.0)
    assert re.match(r"gpu0 util 63 %, SM 61 %, memory 35\.1/140\.5 GiB, power 350/700 W, at 55 C; gpu1 ", line)
    assert line.endswith("host CPU 37 % of 4 cores, memory 12.3/62.8 GiB")


def test_the_table_has_figures_curve_and_processes():
    board = filled_board(seen(0))
    board.processes[0] = [Holder(4711, "/bin/train", 5.0)]
    text = shown(board, blocks=ASCII_BLOCKS)
    assert text.startswith("3 s of 60 s.")
    assert re.search(r"^0 +- +", shown(board_of(seen(0))), re.MULTILINE)
    assert re.search(r"^0 +63 +61 +35\.1/140\.5 +350/700 ", text, re.MULTILINE)
    assert re.search(r"^0 +4711 +5\.0 GiB +/bin/train", text, re.MULTILINE)


def test_a_table_is_drawn_over_and_goes_at_the_end():
    console = Console(file=io.StringIO(), width=80, height=24, force_terminal=True, color_system="standard")
    screen, board = Screen(console, " of 60 s", is_live=True), filled_board(seen(0))
    screen.show(board, 1.0)
    screen.show(board, 2.0)
    screen.close()
    sent = console.file.getvalue()
    assert "2 s of 60 s" in sent
    assert sent.rindex("\x1b[2K") > sent.rindex("2 s of 60 s")


def lines_of(*gpus, curves, problem=None, host=(), span_s=60.0):
    """Returns the summary of curves of utilisation, read twice a second."""
    board = board_of(*gpus)
    for gpu, curve in zip(gpus, curves, strict=True):
        for place, util_pct in enumerate(curve):
            values = {"util_pct": util_pct, "mem_used_gib": 30 + place / 100, "power_w": 300.0}
            board.add([sample(place / 2, gpu.index, {**values, "energy_j": 150.0 * place})])
    board.add([sample(place / 2, HOST, values) for place, values in enumerate(host)])
    return summary_lines(board, span_s, problem)


def test_mean_and_peak_of_everything():
    host = [{"cpu_pct": 100.0, "mem_used_gib": 10.0}, {"cpu_pct": 300.0, "mem_used_gib": 12.0}]
    assert lines_of(seen(0), curves=[[80] * 100 + [94] * 21], host=host)[:-1] == [
        "Watched for 1 min 00 s.",
        "GPU 0 NVIDIA H200: utilisation 82 % on average: well used.",
        "  utilisation: mean 82 %, peak 94 %",
        "  memory: mean 30.6 GiB, peak 31.2 of 140.5 GiB",
        "  power: mean 300 W, peak 300 of 700 W; 18 kJ",
        "Host:",
        "  CPU: mean 50 %, peak 75 % of 4 cores",
        "  memory: mean 11.0 GiB, peak 12.0 of 62.8 GiB",
    ]


@pytest.mark.parametrize(
    ("curve", "verdict"),
    [
        ([85.0] * 120, "well used"),
        ([65.0] * 120, "room left"),
        ([30.0] * 120, "starved"),
        (([95.0] * 10 + [10.0] * 10) * 12, "swings"),
    ],
)
def test_each_verdict_has_a_next_step(curve, verdict):
    lines = lines_of(seen(0), curves=[curve])
    assert f": {verdict}" in lines[1]
    assert "diagnose" in lines[-1]


def test_gpus_with_the_same_verdict_share_the_next_step():
    lines = lines_of(*(seen(index) for index in range(3)), curves=[[30] * 20, [90] * 20, [20] * 20])
    assert [line.partition(": ")[0] for line in lines[-2:]] == ["GPU 0, GPU 2", "GPU 1"]


def test_an_instance_of_a_split_card_shows_its_multiprocessors():
    instance = seen(2, "NVIDIA H200 MIG 1g.18gb", is_mig=True, nvml_index=0, power_limit_w=None)
    board = board_of(instance)
    board.add([sample(second, 2, {"sm_active_pct": 10.0 * second}) for second in range(5)])
    assert list(board.curve(2)[1]) == [0, 10, 20, 30, 40]
    lines = summary_lines(board, 5.0, None)
    assert lines[1].startswith("GPU 2 NVIDIA H200 MIG 1g.18gb of GPU 0: ")
    assert lines[2] == "  SM active: mean 20 %, peak 40 %"


def test_a_gpu_whose_utilisation_was_never_read():
    board = board_of(seen(0), seen(1))
    board.add([sample(1.0, 0, {"mem_used_gib": 3.0})])
    lines = summary_lines(board, 2.0, None)
    assert lines[1:4] == [
        "GPU 0 NVIDIA H200: no utilisation was read.",
        "  memory: mean 3.0 GiB, peak 3.0 of 140.5 GiB",
        "GPU 1 NVIDIA H200: no utilisation was read.",
    ]


def test_without_nvml_the_host_is_summed_up():
    host = [{"cpu_pct": 100.0, "mem_used_gib": 10.0}]
    lines = lines_of(curves=[], problem="library not found", host=host)
    assert lines[1] == "GPU utilisation is unknown (NVML: library not found)."
    assert lines[3].startswith("  CPU: mean 25 %")
    assert lines[-1] == "What is missing: python -m wellfed doctor"
