import io
import os
import re
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.small_terminal import has_terminals
from wellfed.units import (
    counted,
    for_stream,
    gib,
    show_bytes,
    show_count,
    show_duration,
    show_energy,
    show_line,
    show_ms,
    show_percent,
    show_text,
)


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1024**2 - 1, "1.0 MiB"),  # not 1024.0 KiB
        (3.2 * 2**20, "3.2 MiB"),
        (139.8 * 2**30, "139.8 GiB"),
        (5 * 2**40, "5.0 TiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_bytes(number, shown):
    assert show_bytes(number) == shown


@pytest.mark.parametrize(("number", "shown"), [(0, "0 users"), (1, "1 user"), (2, "2 users"), (2048, "2,048 users")])
def test_a_count_and_what_is_counted(number, shown):
    assert counted(number, "user") == shown


@given(st.floats(0, 2**50))
def test_a_byte_count_never_shows_1024_of_a_unit(number):
    value, _, unit = show_bytes(number).partition(" ")
    assert float(value) < 1024 or unit == "TiB"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0 ms"),
        (0.85, "850 ms"),
        (0.9997, "1.0 s"),  # not 1000 ms
        (42, "42.0 s"),
        (59.97, "1 min 00 s"),  # not 60.0 s
        (185, "3 min 05 s"),
        (3599.7, "1 h 00 min"),
        (7800, "2 h 10 min"),
    ],
)
def test_durations(seconds, shown):
    assert show_duration(seconds) == shown


@given(st.floats(0, 1e6))
def test_no_part_of_a_duration_reaches_the_next_unit(seconds):
    for value, unit in re.findall(r"([\d.]+) (ms|s|min)\b", show_duration(seconds)):
        assert float(value) < {"ms": 1000, "s": 60, "min": 60}[unit]


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (0, "0"),
        (0.00423, "0.00423"),
        (0.25, "0.25"),
        (-0.5, "-0.5"),
        (7, "7"),
        (10, "10"),
        (12.5, "12.5"),
        (99.999, "100"),
        (12345.6, "12,346"),
    ],
)
def test_counts(number, shown):
    assert show_count(number) == shown


def test_gib_and_percent():
    assert gib(3 * 2**30) == 3
    assert show_percent(0.5) == "50.0 %"
    assert show_percent(1) == "100.0 %"


@pytest.mark.parametrize(
    ("joules", "shown"),
    [
        (0, "0 uJ"),
        (4.12e-4, "412 uJ"),
        (0.21, "210 mJ"),
        (0.9996, "1 J"),
        (999.4, "999 J"),
        (999.6, "1 kJ"),
        (34_120, "34.1 kJ"),
        (3.6e6, "3.6 MJ"),
        (7.2e12, "7.2e+03 GJ"),
    ],
)
def test_energies(joules, shown):
    assert show_energy(joules) == shown


@given(st.text())
def test_a_text_for_show_holds_nothing_that_is_obeyed(text):
    shown = show_text(text)
    assert "\x1b" not in shown
    assert all(character.isprintable() or character in "\t\n" or ord(character) > 0x9F for character in shown)
    shown.encode("utf-8")
    assert show_text(shown) == shown


@given(st.text())
def test_a_name_is_one_line(text):
    shown = show_line(text)
    assert len(shown.splitlines()) <= 1
    assert shown == show_text(shown).strip()
    assert show_line("a\nb\x1b[31m\tc") == "a b\\x1b[31m c"


@pytest.mark.parametrize(
    ("number", "shown"), [(0.0421, "0.0421 ms"), (85.44, "85.4 ms"), (999.4, "999 ms"), (2990, "3.0 s")]
)
def test_a_part_of_a_step(number, shown):
    assert show_ms(number) == shown


@has_terminals
def test_a_message_is_broken_between_words_on_a_terminal_alone() -> None:
    import fcntl
    import termios

    text = "a long message of many words\n  indented and-hyphenated/path/of/many/characters"
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 12, 0, 0))
    with open(theirs, "w") as terminal:
        shown = for_stream(text, terminal)
        assert for_stream("short", terminal) == "short"
    os.close(ours)
    assert shown.split("\n") == [
        "a long",
        "message of",
        "many words",
        "  indented",
        "and-hyphenated/path/of/many/characters",
    ]
    assert for_stream(text, io.StringIO()) == text
