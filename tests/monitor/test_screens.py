"""The monitor's screens: a table in a terminal, a plain line elsewhere."""

import io
import re

from rich.console import Console

from tests.kit.seen import board_of, filled_board, seen
from wellfed.monitor.processes import GpuProcess
from wellfed.monitor.screens import ASCII_BLOCKS, LiveScreen, plain_line, table
from wellfed.observe.nvml.devices import Holder


def shown(board, width=120, **options):
    console = Console(file=io.StringIO(), width=width)
    console.print(table(board, 30.0, " of 60 s", **options))
    return console.file.getvalue()


def test_a_line_has_the_figures_of_each_gpu_and_of_the_host():
    line = plain_line(filled_board(seen(0), seen(1)), 1.0)
    assert re.match(r"gpu0 util 63 %, SM 61 %, memory 35\.1/140\.5 GiB, power 350/700 W, .*; gpu1 ", line)
    assert line.endswith("host CPU 37 % of 4 cores, memory 12.3/62.8 GiB")


def test_the_table_has_figures_curve_and_processes():
    board = filled_board(seen(0))
    board.set_processes(0, [GpuProcess(Holder(4711, "/bin/train", 5.0), "anna")])
    text = shown(board, blocks=ASCII_BLOCKS)
    assert text.startswith("30 s of 60 s.")
    assert re.search(r"^0 +- +", shown(board_of(seen(0))), re.MULTILINE)
    assert re.search(
        r"^0 +63 +61 +35\.1/140\.5 +350/700 ", shown(filled_board(seen(0))).replace("no reading", ""), re.M
    )
    assert re.search(r"^0 +4711 +anna +5\.0 GiB +/bin/train", text, re.MULTILINE)


def test_a_table_is_drawn_over_and_goes_at_the_end():
    console = Console(file=io.StringIO(), width=80, height=24, force_terminal=True, color_system="standard")
    screen, board = LiveScreen(console, " of 60 s"), filled_board(seen(0))
    screen.show(board, 1.0)
    screen.show(board, 2.0)
    screen.close()
    sent = console.file.getvalue()
    assert "2 s of 60 s" in sent
    assert sent.rindex("\x1b[2K") > sent.rindex("2 s of 60 s")
