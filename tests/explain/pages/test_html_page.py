"""A filled-in page shows values as text, whatever they hold."""

from __future__ import annotations

from pathlib import Path

import pytest
from jinja2 import UndefinedError
from markupsafe import Markup

from wellfed.explain.pages.html_page import fill_in

TEMPLATE = (
    '{% extends "base.html.j2" %}{% block title %}{{ name }}{% endblock %}{% block main %}{{ more }}{% endblock %}'
)


@pytest.fixture
def template(tmp_path: Path) -> Path:
    path = tmp_path / "one.html.j2"
    path.write_text(TEMPLATE)
    return path


def test_a_value_is_text(template: Path) -> None:
    html = fill_in(template, {"name": "<script>", "more": "\x1b[31mred\x00\udc80 & \u202e"})
    assert "<title>&lt;script&gt;</title>" in html
    assert r"\x1b[31mred\x00\udc80 &amp; \u202e" in html
    html.encode("utf-8")


def test_html_of_our_own_stays_html(template: Path) -> None:
    assert "<svg></svg>" in fill_in(template, {"name": "", "more": Markup("<svg></svg>")})


def test_a_value_that_is_missing_is_an_error(template: Path) -> None:
    with pytest.raises(UndefinedError):
        fill_in(template, {"name": ""})
