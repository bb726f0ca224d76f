"""Converts and formats numbers with units, and texts of unknown origin."""

from __future__ import annotations

import os
import re
import textwrap
from typing import TextIO

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and line feed, marks that change the writing direction, and surrogates."""

GIB = 2**30
MIB = 2**20


def gib(num_bytes: float) -> float:
    """Returns bytes as GiB (2**30 bytes)."""
    return num_bytes / GIB


def mib(num_bytes: float) -> float:
    """Returns bytes as MiB (2**20 bytes)."""
    return num_bytes / MIB


def show_bytes(num_bytes: float) -> str:
    """Returns a byte count in the largest binary unit that keeps it above 1, e.g. ``3.2 MiB``."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        text = f"{value:.0f}" if unit == "B" else f"{value:.1f}"
        if abs(float(text)) < 1024:  # rounded first, or 1023.99 KiB would show as 1024.0 KiB
            return f"{text} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def show_gib(num_gib: float) -> str:
    """Formats GiB: ``7.20 GiB``; below one in the unit that keeps it above 1, e.g. ``92.2 MiB``."""
    return f"{num_gib:.2f} GiB" if num_gib >= 1 else show_bytes(num_gib * GIB)


def show_count(number: float) -> str:
    """Returns a count with thousands separators; decimals only below 100, three significant digits below 1."""
    if abs(number) < 1:
        return f"{number:.3g}"
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:,.2f}".rstrip("0").rstrip(".")


def counted(number: int, noun: str) -> str:
    """Returns a count with its noun: ``1 user``, ``2,048 users``. Only for nouns whose plural ends in -s."""
    return f"{show_count(number)} {noun if number == 1 else noun + 's'}"


def show_duration(seconds: float) -> str:
    """Formats a duration: ``850 ms``, ``42.0 s``, ``3 min 05 s``, ``2 h 10 min``."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def show_ms(milliseconds: float) -> str:
    """Formats a part of a step with three digits: ``0.42 ms``, ``85.4 ms``, ``2.99 s``."""
    return f"{milliseconds:.3g} ms" if milliseconds < 999.5 else show_duration(milliseconds / 1e3)


def show_energy(joules: float) -> str:
    """Returns an energy with three digits: ``412 uJ``, ``0.21 J``, ``34.1 kJ``."""
    for factor, unit in ((1e9, "GJ"), (1e6, "MJ"), (1e3, "kJ"), (1.0, "J"), (1e-3, "mJ")):
        if abs(joules) >= 0.9995 * factor:
            return f"{joules / factor:.3g} {unit}"
    return f"{joules / 1e-6:.3g} uJ"


def show_percent(fraction: float) -> str:
    """Returns a fraction 0..1 as a percentage."""
    return f"{100 * fraction:.1f} %"


def show_factor(factor: float) -> str:
    """Returns a factor with at least two digits: ``1.05``, ``2.1``, ``21``."""
    return f"{factor:.2f}" if factor < 1.995 else f"{factor:.1f}" if factor < 9.95 else f"{factor:.0f}"


def show_text(text: str) -> str:
    """Returns the text with control characters written out (``\\x1b``), so that no terminal or page obeys them."""
    return _CONTROL.sub(lambda found: ascii(found.group())[1:-1], text)


def show_line(text: str) -> str:
    """Returns `show_text` of the text on one line, for names from outside."""
    return show_text(" ".join(text.split()))


def wrapped(text: str, columns: int) -> list[str]:
    """Returns the lines of a text, broken between words alone; a longer word has a line of its own."""
    return textwrap.wrap(text, max(1, columns), break_long_words=False, break_on_hyphens=False)


def for_stream(text: str, stream: TextIO) -> str:
    """Returns a message for a stream: on a terminal its lines are broken between words."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (AttributeError, OSError, ValueError):  # a file, a pipe, a closed stream
        return text
    if columns <= 0:  # a terminal that does not report its size
        return text
    return "\n".join("\n".join(wrapped(line, columns)) if len(line) > columns else line for line in text.split("\n"))
