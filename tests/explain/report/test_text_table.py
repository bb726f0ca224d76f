"""One style of table: no frame, no broken word, nothing lost at any width."""

import io
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from wellfed.explain.report.text_table import TextColumn, TextTable, print_command, print_text, shortened

LONG = "/a/folder/" + 60 * "x"


def lines(table: TextTable, width: int | None) -> list[str]:
    return [line.plain for line in table.lines(width)]


def test_numbers_stand_to_the_right_and_two_spaces_between_columns() -> None:
    table = TextTable("name", TextColumn("bytes", is_number=True), title="A title")
    table.add_row("weights", "1,024")
    table.add_row("all", "7", below=["a remark"])
    assert lines(table, 80) == ["A title", "name     bytes", "weights  1,024", "all          7", "  a remark"]


def test_cells_are_wrapped_between_words() -> None:
    table = TextTable("knob", "because")
    table.add_row("loader.num_workers", "3 of 4 cores are left for workers")
    assert lines(table, 40) == [
        "knob                because",
        "loader.num_workers  3 of 4 cores are",
        "                    left for workers",
    ]


def test_columns_that_do_not_fit_are_shown_below_their_row() -> None:
    table = TextTable(*("run", TextColumn("rate", is_number=True), TextColumn("ceiling", below="{} of the ceiling")))
    table.add_row("a" * 20, "12 samples/s", "80 %")
    table.add_row("b", "", "7 {} %")
    assert lines(table, 30) == [
        "run",
        "a" * 20,
        "  rate 12 samples/s, 80 % of",
        "  the ceiling",
        "b",
        "  7 {} % of the ceiling",
    ]


def test_a_cell_with_a_word_longer_than_its_column_is_shown_below() -> None:
    table = TextTable("", "")
    table.add_row("engine", f"wellfed 1.0, {LONG}")
    table.add_row("host", "a machine")
    assert lines(table, 72) == ["engine", "  wellfed 1.0,", f"  {LONG}", "host    a machine"]
    table = TextTable("knob", "A", "B")
    table.add_row("model", 40 * "a", "small")
    head, row, below = lines(table, 44)
    assert row.index("small") == head.index("B")
    assert below == f"  A {40 * 'a'}"


words = st.text(st.characters(blacklist_categories=("Z", "C", "M")), min_size=1, max_size=9)


@given(st.lists(st.lists(words, min_size=3, max_size=3).map(tuple), min_size=1, max_size=4), st.integers(20, 100))
def test_no_word_is_lost_or_broken(rows: list[tuple[str, ...]], width: int) -> None:
    table = TextTable("one", TextColumn("two", is_number=True), TextColumn("three", below="{}"))
    for cells in rows:
        table.add_row(*(f"{cell} {cell}" for cell in cells))
    found = lines(table, width)
    assert all(cell_len(line) <= width for line in found)
    shown = Counter(word for line in found for word in line.replace(",", " ").split())
    assert not Counter(word for row in rows for cell in row for word in 2 * [*cell.replace(",", " ").split()]) - shown


@pytest.mark.parametrize("width", [1, 2, 7])
def test_a_window_that_is_too_narrow_for_a_word_still_shows_it(width: int) -> None:
    table = TextTable("name", "value")
    table.add_row("loader", "processes")
    text = "".join("".join(lines(table, width)).split())
    assert "loader" in text
    assert "processes" in text


def test_cells_and_heads_have_their_styles() -> None:
    table = TextTable("name", "verdict")
    table.add_row("x", Text("Starved", "red"))
    head, row = table.lines(80)
    assert [span.style for span in head.spans] == ["bold", "bold"]
    assert [(span.style, row.plain[span.start : span.end]) for span in row.spans if span.style] == [("red", "Starved")]


def printed(width: int, *, is_terminal: bool, show: object, **options: object) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=is_terminal, color_system=None)
    show(console, **options)  # type: ignore[operator]
    return stream.getvalue()


def test_a_terminal_gets_wrapped_lines_and_a_pipe_one_line() -> None:
    assert printed(12, is_terminal=True, show=print_text, text="- one two three\nfour") == (
        "- one two\n  three\nfour\n"
    )
    text = "    Install it: pip install something"
    assert printed(20, is_terminal=True, show=print_text, text=text) == (
        "    Install it: pip\n    install\n    something\n"
    )
    assert printed(20, is_terminal=False, show=print_text, text=text) == f"{text}\n"


def test_a_command_stays_whole() -> None:
    command = "python src/train.py loader=auto seed=1"
    assert printed(30, is_terminal=True, show=print_command, label="Use it:", command=command) == (
        f"Use it:\n{command}\n"
    )
    for width, is_terminal in ((80, True), (30, False)):
        found = printed(width, is_terminal=is_terminal, show=print_command, label="Use it:", command=command)
        assert found == f"Use it: {command}\n"


@pytest.mark.parametrize(("width", "text"), [(9, "a=1 b=2"), (20, "a=1 b=2"), (6, "(2 more)"), (0, "(2 more)")])
def test_words_are_left_out_whole(width: int, text: str) -> None:
    assert shortened(["a=1", "b=2"], width) == text
    assert shortened([], width) == ""
