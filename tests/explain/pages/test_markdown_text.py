"""Texts of users stay text in Markdown."""

from hypothesis import given
from hypothesis import strategies as st

from wellfed.explain.pages.html_page import code_span, plain_line


@given(st.text())
def test_a_line_holds_nothing_that_markdown_or_a_terminal_obeys(text: str) -> None:
    for found in (plain_line(text), code_span(text)[1:-1]):
        assert not set(found) & set("\n\r\x1b\x00`")
    assert not set(plain_line(text)) & set("<>|*_[]\\")
    assert "|" not in code_span(text).replace(r"\|", "")


def test_what_is_read_is_what_was_written() -> None:
    assert plain_line("a <b> | c\nd") == "a &lt;b&gt; &#124; c d"
    assert code_span("a|b `c`\x1b[1m") == r"`a\|b 'c'\x1b[1m`"
