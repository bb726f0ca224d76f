"""Reads a page as a browser would, and refuses one that runs or loads anything."""

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """Tags, which must close in order, their attributes, and the text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read_page(html: str) -> Page:
    """The parsed page, which neither runs nor loads anything."""
    found = Page(html)
    assert not {"script", "iframe", "object", "embed", "link", "base"} & set(found.tags)
    for name, value in found.attributes:
        assert not name.startswith("on")
        assert name not in ("srcset", "action", "data")
        assert name != "src" or value.startswith("data:image/png;base64,")
        assert not name.endswith("href") or value.startswith("#")
        assert name.startswith("xmlns") or "http" not in value
    assert not re.search(r"@import|url\((?!#)", html)
    return found
