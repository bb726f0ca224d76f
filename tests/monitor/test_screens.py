import io
import os
import re

import pytest
from rich.console import Console

from tests.kit.seen import filled_board, seen
from wellfed.monitor import screens
from wellfed.monitor.screens import BLOCKS, LiveScreen, PlainScreen

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")


def terminal(*, width=80, height=24, **more):
    options = {"force_terminal": True, "markup": False, "highlight": False, **more}
    console = Console(file=io.StringIO(), width=width, height=height, **options)
    return console, console.file


def test_a_line_has_the_time_of_day_and_no_control_codes():
    console = Console(file=io.StringIO(), width=20, markup=False, highlight=False)
    screen = PlainScreen(console)
    screen.print_line("a line that is longer than the [bold]terminal[/bold] is wide")
    screen.show(filled_board(seen(0)), 2.0)
    screen.close()
    first, second = console.file.getvalue().splitlines()
    assert first == "a line that is longer than the [bold]terminal[/bold] is wide"
    assert re.fullmatch(r"\d\d:\d\d:\d\d gpu0 util 63 %, .* GiB", second)
    assert not CONTROL.search(console.file.getvalue())


def test_a_table_is_drawn_over_and_goes_at_the_end():
    console, stream = terminal()
    screen = LiveScreen(console, " of 60 s")
    screen.show(filled_board(seen(0)), 2.0)
    assert "2 s of 60 s" in stream.getvalue()
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l")  # the cursor stays
    drawn = len(stream.getvalue())
    screen.print_line("GPU 0 is lost")
    screen.show(filled_board(seen(0)), 3.0)
    later = stream.getvalue()[drawn:]
    assert later.index("GPU 0 is lost") < later.index("3 s of 60 s")
    assert "\x1b[1A\x1b[2K" in later
    screen.close()
    screen.close()
    assert stream.getvalue().rstrip("\n").endswith(6 * "\x1b[1A\x1b[2K")


def test_no_color_means_no_colour():
    for no_color in (True, False):
        console, stream = terminal(no_color=no_color, color_system="standard")
        LiveScreen(console, "").show(filled_board(seen(0)), 2.0)
        assert bool(re.search(r"\x1b\[[0-9;]*3[0-7]m", stream.getvalue())) != no_color
        console.clear_live()


def test_a_terminal_without_blocks_gets_ascii():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = Console(file=stream, force_terminal=True, width=80, height=24)
    LiveScreen(console, "").show(filled_board(seen(0)), 2.0)
    stream.flush()
    assert not set(stream.buffer.getvalue().decode()) & set(BLOCKS)
    console.clear_live()


def test_nothing_is_drawn_while_the_shell_has_the_terminal(monkeypatch):
    console, stream = terminal()
    monkeypatch.setattr(screens, "_has_terminal", lambda of: False)
    screen = LiveScreen(console, "")
    screen.show(filled_board(seen(0)), 2.0)
    screen.close()
    assert stream.getvalue() == ""


def test_what_was_written_while_it_was_away_stays(monkeypatch):
    console, stream = terminal()
    screen = LiveScreen(console, "")
    screen.show(filled_board(seen(0)), 2.0)
    drawn = len(stream.getvalue())
    with monkeypatch.context() as patch:
        patch.setattr(screens, "_has_terminal", lambda of: False)
        screen.show(filled_board(seen(0)), 3.0)
        screen.print_line("told meanwhile")
        assert stream.getvalue()[drawn:] == "told meanwhile\n"
    screen.show(filled_board(seen(0)), 4.0)
    assert "\x1b[1A" not in stream.getvalue()[drawn:]
    screen.show(filled_board(seen(0)), 5.0)
    assert "\x1b[1A" in stream.getvalue()[drawn:]
    screen.close()


@pytest.mark.skipif(not hasattr(os, "tcgetpgrp"), reason="has no process groups of terminals")
def test_what_is_no_terminal_is_in_nobodys_hands(tmp_path):
    with (tmp_path / "out").open("w") as stream:
        assert screens._has_terminal(Console(file=stream))


def test_a_terminal_that_goes_away_ends_the_drawing():
    class Gone(io.StringIO):
        def write(self, text):
            raise OSError(5, "Input/output error")

    class Noted(Console):
        def on_broken_pipe(self):
            self.quiet = True

    console = Noted(file=Gone(), force_terminal=True, width=80, height=24)
    LiveScreen(console, "").show(filled_board(seen(0)), 2.0)
    assert console.quiet
