"""Pages show values as text, whatever they hold; charts have their figures."""

import hashlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jinja2 import UndefinedError
from markupsafe import Markup

import wellfed.explain.pages
from tests.kit.page_reader import Page
from wellfed.explain.pages.chart import (
    Axis,
    Bar,
    Chart,
    ChartCurve,
    LevelLine,
    bars,
    limits,
)
from wellfed.explain.pages.html_page import fill_in

PAGES = Path(wellfed.explain.pages.__file__).parent
TEMPLATE = (
    '{% extends "base.html.j2" %}{% block title %}{{ name }}{% endblock %}{% block main %}{{ more }}{% endblock %}'
)
NAN = np.nan
CHART = Chart("%", Axis(0.0, 10.0, "step"), [], 100.0)


@pytest.fixture
def template(tmp_path: Path) -> Path:
    path = tmp_path / "one.html.j2"
    path.write_text(TEMPLATE)
    return path


def curve(y: list[float], **more: Any) -> ChartCurve:
    return ChartCurve("a curve", "accent", np.linspace(0.0, 10.0, len(y)), np.array(y, dtype=float), **more)


def test_a_value_is_text_and_html_of_our_own_stays_html(template: Path) -> None:
    html = fill_in(template, {"name": "<script>", "more": "\x1b[31mred\x00\udc80 & \u202e"})
    assert "<title>&lt;script&gt;</title>" in html
    assert r"\x1b[31mred\x00\udc80 &amp; \u202e" in html
    html.encode("utf-8")
    assert "<svg></svg>" in fill_in(template, {"name": "", "more": Markup("<svg></svg>")})
    with pytest.raises(UndefinedError):
        fill_in(template, {"name": ""})


def test_a_page_has_the_script_of_charts_if_it_has_one(template: Path) -> None:
    assert "<script" not in fill_in(template, {"name": "", "more": "<!--script-->"})
    html = fill_in(template, {"name": "", "more": replace(CHART, curves=[curve([1, 2])]).html})
    assert "uPlot" in html
    assert "The MIT License (MIT)" in html


def test_a_chart_has_its_figures_rounded_and_what_lies_beside_them() -> None:
    chart = replace(
        CHART,
        curves=[curve([0.0, NAN, 63.2712]), curve([1, 2, 3], low=np.zeros(3), high=np.ones(3), kind="area")],
        levels=[LevelLine("most", 75.0, "bad", "dashed")],
        spans=[(2.0, 4.0, "validate")],
        told='<b> & "quoted"\x1b',
    )
    page = Page(str(chart.html))
    (found,) = page.charts
    assert [one[4] for one in found["c"]] == [[0, None, 63.2712], [1, 2, 3]]
    assert found["l"] == [[75, "bad", "dashed"]]
    assert found["s"] == [[2, 4, "validate"]]
    assert ("aria-label", '<b> & "quoted"\\x1b') in page.attributes


@pytest.mark.parametrize("y", [[], [NAN], [np.inf, -np.inf]])
@pytest.mark.parametrize("kind", ["line", "area"])
def test_nothing_to_draw_is_an_empty_chart(y: list[float], kind: Any) -> None:
    assert "nan" not in str(replace(CHART, curves=[curve(y, kind=kind)]).html).lower()


def test_limits_hold_all_that_is_finite() -> None:
    assert limits(np.array([1.0, NAN, 3.0, np.inf]), 0.5) == (0.0, 4.0)
    assert limits(np.array([NAN])) == (0.0, 1.0)
    low, high = limits(np.array([2.0]))
    assert low < 2 < high


def test_bars_share_a_scale() -> None:
    html = bars(
        [Bar("A<", [("one", 3.0, "wait"), ("two", 1.0, "copy")], "4 ms"), Bar("B", [("one", 2.0, "wait")])], "told"
    )
    assert re.findall(r"width:([\d.]+)%", html) == ["75", "25", "50"]
    assert "A&lt;" in html


def test_the_library_is_what_its_notice_says() -> None:
    folder = PAGES / "uplot"
    digest = hashlib.sha256((folder / "uPlot.js").read_bytes()).hexdigest()
    assert digest in (folder / "README.md").read_text()
