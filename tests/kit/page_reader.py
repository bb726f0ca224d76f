"""Reads a page as a browser would, and refuses one that runs anything but the script of charts, or loads anything."""

import json
import re
from html.parser import HTMLParser
from typing import Any

from wellfed.explain.pages.html_page import script

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """Tags, which must close in order, their attributes, and the text; what scripts hold is beside it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        else:
            self.text += data

    @property
    def charts(self) -> list[dict[str, Any]]:
        """Figures of the charts."""
        return [json.loads(text) for attributes, text in self.scripts if attributes.get("type") == "application/json"]


def read_page(html: str) -> Page:
    """The parsed page, which loads nothing and runs the script of charts alone."""
    found = Page(html)
    for attributes, text in found.scripts:
        assert attributes == {"type": "application/json"} or text in script()
    assert len(found.charts) == html.count(" alive")
    assert not {"iframe", "object", "embed", "link", "base"} & set(found.tags)
    for name, value in found.attributes:
        assert not name.startswith("on")
        assert name not in ("srcset", "action", "data")
        assert name != "src" or value.startswith("data:image/png;base64,")
        assert not name.endswith("href") or re.fullmatch(r"#\w+|(?!/)[\w./%-]+", value)
        assert name.startswith("xmlns") or "http" not in value
    assert not re.search(r"@import|url\((?!#)", html)
    return found
