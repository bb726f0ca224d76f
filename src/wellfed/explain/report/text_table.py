"""Lays out tables for a terminal, in one style for all commands."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.text import Text

from wellfed.units import show_line, wrapped

PIPED_COLUMNS = 160
"""Width where the output is no terminal. 80 is too narrow for boards."""
GAP = 2
"""Spaces between two columns."""
_LEAST_WIDTH = 16
"""Minimum width of a column whose texts are wrapped. Columns without it are shown below their rows."""


def console_width() -> int | None:
    """Returns the width of a console; None = the terminal's."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    return None if is_terminal else PIPED_COLUMNS


class TextTable:
    """Table without a frame: bold heads, two spaces between columns.

    The first column that does not fit is wrapped. Those after it are shown in lines below their row.

    Args:
        numbers: heads of columns that are aligned to the right.
    """

    def __init__(self, *heads: str, title: str = "", numbers: Collection[str] = ()) -> None:
        self._title = show_line(title)
        self._is_number = [head in numbers for head in heads]
        self._rows = [[Text(show_line(head), "bold") for head in heads]]

    def add_row(self, *cells: str | Text) -> None:
        """Adds a row of cells, each in one style."""
        styled = (cell if isinstance(cell, Text) else Text(cell) for cell in cells)
        self._rows.append([Text(show_line(cell.plain), cell.style) for cell in styled])

    def lines(self, width: int | None) -> Iterator[Text]:
        """Yields the lines for a terminal of ``width`` columns, None = unlimited, without spaces at their ends."""
        width = width or sys.maxsize
        heads, *rows = self._rows
        widths = self._widths(width)
        yield from (Text(line, "bold") for line in wrapped(self._title, width))
        if any(head.plain for head in heads):
            yield from self._beside(heads, widths)
        for cells in rows:
            yield from self._beside(cells, widths)
            hidden = zip(heads[len(widths) :], cells[len(widths) :], strict=True)
            rest = ", ".join(f"{head.plain} {cell.plain}".lstrip() for head, cell in hidden if cell.plain)
            yield from (Text(f"  {line}") for line in wrapped(rest, width - 2))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Yields the lines for a console of rich."""
        for line in self.lines(options.max_width):
            line.no_wrap, line.overflow = True, "ignore"
            yield line

    def _widths(self, width: int) -> list[int]:
        """Returns the widths of the columns that are shown beside each other: at least of the first."""
        left, found = width, list[int]()
        for one in (max(cell.cell_len for cell in column) for column in zip(*self._rows, strict=True)):
            if one > left and left < _LEAST_WIDTH and found:
                break
            found.append(max(1, min(one, left)))
            left -= found[-1] + GAP
        return found

    def _beside(self, cells: Sequence[Text], widths: Sequence[int]) -> Iterator[Text]:
        texts = [wrapped(cell.plain, one) or [""] for cell, one in zip(cells, widths, strict=False)]
        for place in range(max(map(len, texts))):
            line, indent = Text(), 0
            for is_number, cell, parts, one in zip(self._is_number, cells, texts, widths, strict=False):
                if place < len(parts) and (text := parts[place]):
                    start = indent + (one - cell_len(text) if is_number else 0)
                    line.append(" " * (start - line.cell_len)).append(text, cell.style)
                indent += one + GAP
            yield line


def print_text(console: Console, text: str, style: str = "") -> None:
    """Prints a text. A terminal gets lines that end between words and keep the indent, others get whole lines."""
    for line in text.split("\n"):
        rest = line.lstrip(" ").removeprefix("- ")
        start = line.removesuffix(rest)
        width = console.width - len(start) if console.is_terminal else sys.maxsize
        for part in wrapped(rest, width) or [""]:
            console.print(f"{start}{part}", style=style, soft_wrap=True)
            start = " " * len(start)


def print_command(console: Console, label: str, command: str) -> None:
    """Prints a command to copy: whole, and on its own line if a terminal has no space for it after the label."""
    fits = not console.is_terminal or cell_len(label) + 1 + cell_len(command) <= console.width
    console.print(f"{label}{' ' if fits else chr(10)}{command}", soft_wrap=True)
