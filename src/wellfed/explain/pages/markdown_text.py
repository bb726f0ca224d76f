"""Puts texts into Markdown so that they stay text."""

from __future__ import annotations

from wellfed.units import show_text

_ESCAPED = str.maketrans(
    {"&": "&amp;", "<": "&lt;", ">": "&gt;"} | {special: f"&#{ord(special)};" for special in "|`*_~[]\\"}
)


def code_span(text: str) -> str:
    """Returns a code span in which nothing is rendered as Markdown; a bar is escaped for tables."""
    return f"`{' '.join(show_text(text).split()).replace('`', chr(39)).replace('|', chr(92) + '|')}`"


def plain_line(text: str) -> str:
    """Returns a line in which nothing is rendered as Markdown or HTML."""
    return " ".join(show_text(text).translate(_ESCAPED).split())
