"""One style of table: no frame, no broken word, nothing lost at any width."""

import io

from rich.console import Console

from wellfed.explain.report.text_table import TextTable, print_command, print_text


def lines(table: TextTable, width: int | None) -> list[str]:
    return [line.plain for line in table.lines(width)]


def test_numbers_stand_to_the_right_and_two_spaces_between_columns() -> None:
    table = TextTable("name", "bytes", title="A title", numbers=["bytes"])
    table.add_row("weights", "1,024")
    table.add_row("all", "7")
    assert lines(table, 80) == ["A title", "name     bytes", "weights  1,024", "all          7"]


def test_the_first_column_that_does_not_fit_is_wrapped_and_those_after_it_are_below_the_row() -> None:
    table = TextTable("run", "why", "rate", numbers=["rate"])
    table.add_row("a" * 9, "one two three four five", "12 samples/s")
    table.add_row("b", "", "")
    assert lines(table, 28) == [
        "run        why",
        "aaaaaaaaa  one two three",
        "           four five",
        "  rate 12 samples/s",
        "b",
    ]
    assert lines(table, 20) == ["run", "aaaaaaaaa", "  why one two three", "  four five, rate 12", "  samples/s", "b"]


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
