import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.seen import FULL, board_of, filled_board, sample, seen
from wellfed.monitor.gpu_cells import plain_line
from wellfed.monitor.live_table import ASCII_BLOCKS, BLOCKS, block, table
from wellfed.monitor.processes import GpuProcess
from wellfed.observe.nvml.devices import Holder
from wellfed.observe.telemetry.machines import HOST


def text_of(board, now_s=2.0, *, width=80, height=24, **more):
    return [line.plain.rstrip() for line in table(board, now_s, " of 60 s", width=width, height=height, **more)]


def with_processes(board, gpu, *commands, rank=None):
    """Gives a GPU processes of 1, 2, ... GiB."""
    found = [
        GpuProcess(Holder(100 + gib, "python", gib), rank, tuple(text.split())) for gib, text in enumerate(commands, 1)
    ]
    board.set_processes(gpu, found)
    return board


def test_a_gpu_has_all_its_figures_at_80_columns():
    board = with_processes(
        filled_board(seen(0), seen(7)), 7, "python train.py loader=auto", "python other.py", rank="rank 3"
    )
    assert text_of(board, height=15) == [
        "2 s of 60 s. Curves: utilisation, the last 1 min 15 s.",
        "GPU   util %  SM %   memory GiB    power W  SM/mem MHz  PCIe in/out MB/s  temp C",
        "  0       63    61   35.1/140.5    350/700   1980/3201         20480/315      55",
        "     memory █████░░░░░░░░░░░░░░░░░  25 %     power ███████████░░░░░░░░░░░░  50 %",
        " " * 79 + "▅",
        "  7       63    61   35.1/140.5    350/700   1980/3201         20480/315      55",
        "     memory █████░░░░░░░░░░░░░░░░░  25 %     power ███████████░░░░░░░░░░░░  50 %",
        " " * 79 + "▅",
        "host CPU 37 % of 4 cores, memory 12.3/62.8 GiB",
        " " * 79 + "▄",
        "GPU  pid   memory  process",
        "  7  101  1.0 GiB  rank 3: python train.py loader=auto",
        "  7  102  2.0 GiB  rank 3: python other.py",
    ]


@pytest.mark.parametrize(("num", "height"), [(0, 24), (1, 24), (1, 50), (2, 50), (8, 50)])
def test_it_fills_the_window(num, height):
    lines = text_of(filled_board(*(seen(index) for index in range(num))), width=160, height=height)
    assert height - num - 1 <= len(lines) <= height
    assert len(lines[-1]) == 160


def test_a_high_curve_has_a_scale_and_as_many_lines_as_fit():
    board = board_of(seen(0))
    for second in range(240):
        board.add([sample(second / 2, 0, {"util_pct": 100 if second % 20 < 10 else 47})])
    lines = text_of(board, 120.0, height=13, width=45)
    curve = lines[4:8]
    assert [line[:5].strip() for line in curve] == ["100", "", "", "0"]
    assert [line[5:].ljust(40) for line in curve] == [*2 * [4 * "█████     "], *2 * [40 * "█"]]


def test_processes_that_do_not_fit_are_counted_and_commands_are_cut_between_words():
    board = with_processes(filled_board(seen(0)), 0, *["python train.py experiment=recsys_starved loader=auto"] * 9)
    lines = text_of(board, width=50, height=11)
    head = next(place for place, line in enumerate(lines) if "process" in line)
    assert lines[head] == "GPU  pid   memory  process, 3 of 9"
    assert lines[head + 1] == "  0  101  1.0 GiB  python train.py (2 more)"
    assert len(lines) <= 11


def test_bars_are_shares_of_the_limits_and_a_full_memory_is_red():
    for used_gib, colour in ((140.0, "red"), (70.0, "cyan")):
        board = board_of(seen(0, power_limit_w=None))
        board.add([sample(1.0, 0, {"mem_used_gib": used_gib, "power_w": 100.0})])
        (bars,) = [line for line in table(board, 2.0, "", width=80, height=24) if line.plain.startswith("     memory")]
        assert {str(span.style) for span in bars.spans} == {colour}
        assert "power" not in bars.plain
    assert f"     memory {15 * '#'}{16 * '-'}  50 %" in text_of(board, width=49, blocks=ASCII_BLOCKS)


@pytest.mark.parametrize("width", [20, 30, 40])
def test_a_narrow_window_shows_the_bar_of_memory(width):
    lines = text_of(filled_board(seen(0)), width=width)
    (bar,) = [line for line in lines if "░" in line]
    assert bar.split()[0] == "memory"
    assert len(bar) <= width


def test_a_longer_watch_is_told_in_minutes():
    assert text_of(filled_board(seen(0)), 185.0)[0].startswith("3 min 05 s of 60 s.")


@pytest.mark.parametrize("width", [20, 40, 60, 79, 80, 200])
def test_no_line_is_wider_than_the_terminal_and_figures_are_whole(width):
    lines = text_of(filled_board(seen(0), seen(1)), width=width)
    assert all(len(line) <= width for line in lines)
    assert (
        lines[2].split()
        == ["0", "63", "61", "35.1/140.5", "350/700", "1980/3201", "20480/315", "55"][: len(lines[2].split())]
    )


@pytest.mark.parametrize("height", [3, 5, 8, 12, 24])
@pytest.mark.parametrize("num", [0, 1, 4, 8, 16])
def test_no_table_is_taller_than_the_terminal(num, height):
    lines = text_of(filled_board(*(seen(index) for index in range(num))), height=height)
    if height > 4:
        assert len(lines) <= height
    shown = [line for line in lines if re.match(r" +\d+ +63 ", line)]
    more = [line for line in lines if "a taller window" in line]
    assert more == ([f"and {num - len(shown)} more: a taller window shows them"] if len(shown) < num else [])
    assert any(line.startswith("host CPU") for line in lines)


def test_eight_gpus_and_their_curves_fit_into_24_lines():
    lines = text_of(filled_board(*(seen(index) for index in range(8))), height=23)
    assert len([line for line in lines if line.strip() == "▅"]) == 8


def test_without_gpus_it_is_the_host():
    assert text_of(filled_board(), height=3)[1:] == ["host CPU 37 % of 4 cores, memory 12.3/62.8 GiB", " " * 79 + "▄"]


def test_what_is_not_known_is_a_dash():
    gpu = seen(0, memory_total_bytes=None, power_limit_w=None)
    board = board_of(gpu)
    assert text_of(board)[2].split() == ["0", *["-"] * 7]
    board.add([sample(0.0, 0, {"mem_used_gib": 1.0, "power_w": 20.0, "sm_clock_mhz": 300.0})])
    assert text_of(board)[2].split() == ["0", "-", "-", "1.0", "20", "300/-", "-", "-"]
    assert "host CPU - of 4 cores, memory -/62.8 GiB" in text_of(board)


def test_a_gpu_without_readings_says_why():
    board = filled_board(seen(0), seen(1))
    board.lose(1)
    assert [text_of(board, 9.0, height=8)[place] for place in (2, 4)] == [
        "  0   no reading for 8 s",
        "  1   lost; looked for again from time to time",
    ]
    assert plain_line(board, 9.0) == (
        "gpu0 no reading for 8 s; gpu1 lost; looked for again from time to time; "
        "host CPU 37 % of 4 cores, memory 12.3/62.8 GiB"
    )


def test_a_line_has_the_same_figures_and_leaves_out_what_is_not_known():
    board = board_of(seen(0), seen(1), seen(2))
    board.add([sample(1.0, 0, FULL), sample(1.0, 1, {"util_pct": 5.0, "pcie_rx_mb_s": 3.0})])
    board.add([sample(1.0, HOST, {"cpu_pct": 400.0, "mem_used_gib": 1.0})])
    assert plain_line(board, 1.5) == (
        "gpu0 util 63 %, SM 61 %, memory 35.1/140.5 GiB, power 350/700 W, SM/mem 1980/3201 MHz, "
        "PCIe in/out 20480/315 MB/s, at 55 C; gpu1 util 5 %, PCIe in/out 3/- MB/s; gpu2 no reading yet; "
        "host CPU 100 % of 4 cores, memory 1.0/62.8 GiB"
    )


def test_the_curve_is_the_latest_time_and_shows_a_swing():
    board = board_of(seen(0))
    for half_second in range(240):
        time_s = half_second / 2
        board.add([sample(time_s, 0, {"util_pct": 95 if time_s % 10 < 5 else 5})])

    def curve(**more):
        return text_of(board, 120.0, height=6, **more)[3].strip()

    assert curve(width=65) == 6 * (5 * "█" + 5 * "▁")
    assert curve(width=65, blocks=ASCII_BLOCKS) == 6 * "#####_____"
    assert len(curve(width=40)) == 35
    assert len(curve(width=160)) == 120
    board.interval_s = 5.0
    assert len(curve(width=40)) == 24


@given(st.floats(-10, 110))
def test_a_block_is_as_high_as_the_figure(pct):
    height = BLOCKS.index(block(pct, BLOCKS)) / (len(BLOCKS) - 1)
    assert abs(height - min(100, max(0, pct)) / 100) <= 0.5 / (len(BLOCKS) - 1) + 1e-9


def test_utilisation_is_coloured_by_its_level():
    for util_pct, style in [(80, "green"), (79, "yellow"), (50, "yellow"), (49, "red")]:
        board = board_of(seen(0))
        board.add([sample(1.0, 0, {"util_pct": util_pct})])
        row, curve = table(board, 3.0, "", width=80, height=6)[2:4]
        assert [{span.style for span in line.spans} for line in (row, curve)] == [{style}, {style}]
