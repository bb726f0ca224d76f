"""Lays out tables for a terminal: one style for all commands, and no broken words."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len, chop_cells
from rich.console import Console, ConsoleOptions
from rich.text import Text

from wellfed.units import show_line, wrapped

PIPED_COLUMNS = 160
"""Width where the output is no terminal. 80 is too narrow for boards."""
GAP = 2
"""Spaces between two columns."""
_LONG_WORD = 16
"""Minimum width of a column with longer words. Cells with a word longer than their column are shown below the row."""


def console_width() -> int | None:
    """Returns the width of a console; None = the terminal's."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    return None if is_terminal else PIPED_COLUMNS


@dataclass(frozen=True)
class TextColumn:
    """Column of a `TextTable`."""

    head: str
    is_number: bool = False
    """Aligned to the right and never wrapped."""
    is_whole: bool = False
    """Never wrapped."""
    below: str = ""
    """Text for a cell that does not fit beside the others, such as ``{} of the ceiling``. Default: head and cell."""
    max_width: int | None = None


class TextTable:
    """Table without a frame: bold heads, two spaces between columns, numbers to the right.

    Cells are wrapped between words. Cells that do not fit are shown in a line below their row.
    """

    def __init__(self, *columns: str | TextColumn, title: str = "") -> None:
        typed = [TextColumn(one) if isinstance(one, str) else one for one in columns]
        self._columns = [replace(column, head=show_line(column.head)) for column in typed]
        self._title, self._rows = title, list[tuple[list[Text], list[str]]]()

    def add_row(self, *cells: str | Text, below: Sequence[str] = ()) -> None:
        """Adds a row of cells, each in one style, with lines of text ``below`` it."""
        styles = (cell.style if isinstance(cell, Text) else "" for cell in cells)
        shown = [Text(show_line(str(cell)), style) for cell, style in zip(cells, styles, strict=True)]
        self._rows.append((shown, [show_line(text) for text in below if text]))

    def lines(self, width: int | None) -> Iterator[Text]:
        """Yields the lines for a terminal of ``width`` columns, None = unlimited, without spaces at their ends."""
        width = width or sys.maxsize
        widths = self._fitted(width)
        if self._title:
            yield from (Text(line, "bold") for line in _wrapped(show_line(self._title), width))
        if any(column.head for column in self._columns):
            yield from self._row([Text(column.head, "bold") for column in self._columns], widths)
        for cells, below in self._rows:
            fits = [place == 0 or _longest_word(cells[place].plain) <= widths[place] for place in range(len(widths))]
            yield from self._row([cell if fit else Text() for cell, fit in zip(cells, fits, strict=False)], widths)
            hidden = zip(self._columns, cells, [*fits, *[False] * (len(cells) - len(fits))], strict=True)
            texts = [
                (column.below or f"{column.head} {{}}".lstrip()).replace("{}", cell.plain)
                for column, cell, fit in hidden
                if cell.plain and not fit
            ]
            for text in filter(None, [", ".join(texts), *below]):
                yield from (Text(f"  {line}") for line in _wrapped(text, width - 2))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Yields the lines for a console of rich."""
        for line in self.lines(options.max_width):
            line.no_wrap, line.overflow = True, "ignore"
            yield line

    def _widths(self) -> tuple[list[int], list[int]]:
        """Returns for each column its width without wrapping, and its minimum."""
        natural, least = [], []
        for place, column in enumerate(self._columns):
            texts = [column.head, *(cells[place].plain for cells, _ in self._rows)]
            widest = max(map(cell_len, texts))
            longest = widest if column.is_number or column.is_whole else max(map(_longest_word, texts))
            wanted = max(longest, min(widest, column.max_width or widest))
            natural.append(wanted)
            is_fixed = column.is_number or column.is_whole or place == 0
            least.append(longest if is_fixed else max(_longest_word(column.head), min(longest, _LONG_WORD)))
        return natural, least

    def _fitted(self, width: int) -> list[int]:
        """Returns the widths of the columns that fit beside each other: at least of the first."""
        natural, least = self._widths()
        for number in range(len(natural), 1, -1):
            left = width - GAP * (number - 1)
            shown, wanted = least[:number], natural[:number]
            if sum(shown) > left:
                continue
            if sum(wanted) <= left:
                return wanted
            # The widest columns are narrowed first, to the same level.
            level = left
            while sum(_levelled(shown, wanted, level)) > left:
                level -= 1
            return _levelled(shown, wanted, level)
        return [min(natural[0], width)]

    def _row(self, cells: Sequence[Text], widths: Sequence[int]) -> Iterator[Text]:
        wrapped = [_wrapped(cell.plain, one) for cell, one in zip(cells, widths, strict=False)]
        for place in range(max(map(len, wrapped))):
            line, indent = Text(), 0
            for column, cell, texts, one in zip(self._columns, cells, wrapped, widths, strict=False):
                if place < len(texts) and (text := texts[place]):
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


def shortened(words: Sequence[str], width: int) -> str:
    """Returns as many whole words as fit, and the number of the others: ``gpu=8gb seed=3 (2 more)``."""
    for number in range(len(words), 0, -1):
        rest = f" ({len(words) - number} more)" if number < len(words) else ""
        if cell_len(text := f"{' '.join(words[:number])}{rest}") <= width:
            return text
    return f"({len(words)} more)" if words else ""


def _levelled(least: Sequence[int], wanted: Sequence[int], level: int) -> list[int]:
    return [max(low, min(high, level)) for low, high in zip(least, wanted, strict=True)]


def _longest_word(text: str) -> int:
    return max(map(cell_len, text.split(" ")))


def _wrapped(text: str, width: int) -> list[str]:
    """Returns lines of at most ``width``. Only longer words are cut."""
    if cell_len(text) <= width:
        return [text]
    lines = list[str]()
    for word in text.split(" "):
        if lines and cell_len(lines[-1]) + 1 + cell_len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines += chop_cells(word, max(1, width)) or [""]
    return lines
