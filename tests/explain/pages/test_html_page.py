"""A filled-in page shows values as text, whatever they hold."""

import base64
import hashlib
import re
import sys
import zlib
from pathlib import Path

import pytest
from jinja2 import UndefinedError
from markupsafe import Markup

import wellfed.explain.pages
from wellfed.explain.pages import html_page
from wellfed.explain.pages.html_page import fill_in, script

PAGES = Path(wellfed.explain.pages.__file__).parent
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


def test_the_policy_allows_the_script_of_charts_alone():
    html, policy = script()
    packed, loader = re.findall(r"<script[^>]*>(.*?)</script>", html, re.DOTALL)
    code = zlib.decompress(base64.b64decode(packed)).decode()
    assert code.startswith("/*! https://github.com/leeoniya/uPlot (v1.6.32)")
    allowed = {base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (loader, code)}
    assert set(re.findall(r"'sha256-([^']*)'", policy)) == allowed
    assert policy.startswith("default-src 'none'")
    assert "The MIT License (MIT)" in html
    assert not re.search(r"\beval\(|new Function", code)
    assert len(html) < 60_000  # of which each page of a short run mostly consists


def test_the_library_is_what_its_notice_says():
    folder = PAGES / "uplot"
    digest = hashlib.sha256((folder / "uPlot.js").read_bytes()).hexdigest()
    assert f"| `uPlot.js` | `{digest}` |" in (folder / "README.md").read_text()


def test_a_page_without_charts_has_no_script(template: Path) -> None:
    assert "<script" not in fill_in(template, {"name": "", "more": "<!--script-->"})


def test_a_template_is_compiled_once_and_again_when_it_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(html_page._COMPILED, "directory", str(tmp_path / "compiled"))
    (template := tmp_path / "page.html.j2").write_text("{{ name }} is one")
    assert fill_in(template, {"name": "a"}) == "a is one"  # the folder is not there: nothing is kept
    (tmp_path / "compiled").mkdir()
    assert fill_in(template, {"name": "a"}) == "a is one"
    (kept,) = (tmp_path / "compiled").iterdir()
    before = kept.stat().st_mtime_ns
    assert fill_in(template, {"name": "b"}) == "b is one"
    assert kept.stat().st_mtime_ns == before
    whole = kept.read_bytes()
    for size in (*range(0, 60, 7), *range(60, len(whole), 101)):  # as after a power cut; the head has 60 bytes
        kept.write_bytes(whole[:size])
        assert fill_in(template, {"name": "c"}) == "c is one"
    template.write_text("{{ name }} is two")
    assert fill_in(template, {"name": "a"}) == "a is two"


def test_nothing_is_written_where_python_must_not_write(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(html_page._COMPILED, "directory", str(tmp_path))
    (template := tmp_path / "page.html.j2").write_text("one")
    assert fill_in(template, {}) == "one"
    assert list(tmp_path.iterdir()) == [template]
