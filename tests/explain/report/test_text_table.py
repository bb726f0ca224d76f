"""One style of table: no frame, no broken word, nothing lost at any width."""

import io
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from wellfed.explain.report.text_table import TextColumn, TextTable, print_command, print_text


def lines(table: TextTable, width: int | None) -> list[str]:
    return [line.plain for line in table.lines(width)]


def test_numbers_stand_to_the_right_and_two_spaces_between_columns() -> None:
    table = TextTable("name", TextColumn("bytes", is_number=True), title="A title")
    table.add_row("weights", "1,024")
    table.add_row("all", "7", below=["a remark"])
    assert lines(table, 80) == ["A title", "name     bytes", "weights  1,024", "all          7", "  a remark"]


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
