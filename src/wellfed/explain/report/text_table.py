"""Lays out tables for a terminal, in one style for all commands."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class TextColumn:
    """Column of a `TextTable`."""

    head: str
    is_number: bool = False
    """Aligned to the right."""


class TextTable:
    """Table without a frame: bold heads, two spaces between columns, numbers to the right.

    The first column that does not fit is wrapped. Those after it are shown in lines below their row.
    """

    def __init__(self, *columns: str | TextColumn, title: str = "") -> None:
        self._columns = [TextColumn(one) if isinstance(one, str) else one for one in columns]
        self._title, self._rows = title, list[tuple[list[Text], list[str]]]()

    def add_row(self, *cells: str | Text, below: Sequence[str] = ()) -> None:
        """Adds a row of cells, each in one style, with lines of text ``below`` it."""
        styles = (cell.style if isinstance(cell, Text) else "" for cell in cells)
        shown = [Text(show_line(str(cell)), style) for cell, style in zip(cells, styles, strict=True)]
        self._rows.append((shown, [show_line(text) for text in below if text]))

    def lines(self, width: int | None) -> Iterator[Text]:
        """Yields the lines for a terminal of ``width`` columns, None = unlimited, without spaces at their ends."""
        width = width or sys.maxsize
        heads = [Text(show_line(column.head), "bold") for column in self._columns]
        widths = self._widths(heads, width)
        yield from (Text(line, "bold") for line in wrapped(show_line(self._title), width))
        if any(head.plain for head in heads):
            yield from self._row(heads, widths)
        for cells, below in self._rows:
            yield from self._row(cells, widths)
            hidden = zip(heads[len(widths) :], cells[len(widths) :], strict=True)
            rest = ", ".join(f"{head.plain} {cell.plain}".lstrip() for head, cell in hidden if cell.plain)
            for text in filter(None, [rest, *below]):
                yield from (Text(f"  {line}") for line in wrapped(text, width - 2))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Yields the lines for a console of rich."""
        for line in self.lines(options.max_width):
            line.no_wrap, line.overflow = True, "ignore"
            yield line

    def _widths(self, heads: Sequence[Text], width: int) -> list[int]:
        """Returns the widths of the columns that are shown beside each other: at least of the first."""
        rows = [heads, *(cells for cells, _ in self._rows)]
        left, found = width, list[int]()
        for one in (max(cells[place].cell_len for cells in rows) for place in range(len(heads))):
            if one > left and left < _LEAST_WIDTH and found:
                break
            found.append(max(1, min(one, left)))
            left -= found[-1] + GAP
        return found

    def _row(self, cells: Sequence[Text], widths: Sequence[int]) -> Iterator[Text]:
        texts = [wrapped(cell.plain, one) or [""] for cell, one in zip(cells, widths, strict=False)]
        for place in range(max(map(len, texts))):
            line, indent = Text(), 0
            for column, cell, parts, one in zip(self._columns, cells, texts, widths, strict=False):
                if place < len(parts) and (text := parts[place]):
                    start = indent + (one - cell_len(text) if column.is_number else 0)
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
