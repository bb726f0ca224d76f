"""Charts are drawn where their figures are, take the colours of the page, and interrupt a line where there is none."""

import re
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wellfed.explain.pages.chart import (
    Axis,
    Bar,
    Chart,
    ChartCurve,
    LevelLine,
    Note,
    Stretch,
    _figures,
    bars,
    limits,
    nice_ticks,
    show_tick,
)

NAN = np.nan
CHART = Chart("%", Axis(0.0, 10.0, "step"), [], 100.0)


def curve(y: list[float], **more: Any) -> ChartCurve:
    return ChartCurve("a curve", "accent", np.linspace(0.0, 10.0, len(y)), np.array(y, dtype=float), **more)


def paths(chart: Chart) -> dict[str, str]:
    """Each path by its class."""
    return dict(re.findall(r'<path class="([^"]*)" [^>]*d="([^"]*)"', chart.svg))


def points(path: str) -> list[tuple[int, int]]:
    """Ends of the steps of a path of one stretch."""
    found: list[tuple[int, int]] = []
    for kind, x, y in re.findall(r"([Ml])(-?\d+) ?(-?\d+)", path):
        at = (int(x), int(y)) if kind == "M" else (found[-1][0] + int(x), found[-1][1] + int(y))
        found.append(at)
    return found


def test_a_line_goes_through_its_values():
    line = paths(replace(CHART, curves=[curve([0, 100, 50, 25])]))["l"]
    assert points(line) == [(0, 250), (333, 0), (667, 125), (1000, 188)]


def test_a_line_is_interrupted_where_a_value_is_missing():
    line = paths(replace(CHART, curves=[curve([0, NAN, 50, np.inf, 25, 25])]))["l"]
    assert line == "M0 250h0M400 125h0M800 188l200 0"


def test_a_note_at_no_number_is_left_out():
    chart = replace(CHART, curves=[curve([0, 50])], notes=[Note(0.0, 50.0, "here"), Note(5.0, NAN, "nowhere")])
    assert ">here<" in chart.svg
    assert "nowhere" not in chart.svg


def test_a_value_far_beyond_the_chart_is_cut():
    line = paths(replace(CHART, curves=[curve([0, 1e30])]))["l"]
    assert points(line)[1] == (1000, -1000)


def test_areas_stand_on_each_other():
    chart = replace(
        CHART,
        curves=[
            curve([20, 20], kind="area"),
            ChartCurve("b", "one", np.array([0.0, 10]), np.array([60.0, 40]), kind="area"),
        ],
    )
    first, second = re.findall(r'class="a" style="--c:var\(--(\w+)\)" d="([^"]*)"', chart.svg)
    assert (first[0], points(first[1])[:2]) == ("one", [(0, 50), (1000, 100)])
    assert (second[0], points(second[1])[:2]) == ("accent", [(0, 200), (1000, 200)])


def test_a_range_is_drawn_where_points_stand_for_several_readings():
    thinned = curve([50, 50], low=np.array([40.0, 40]), high=np.array([60.0, 60]))
    assert points(paths(replace(CHART, curves=[thinned]))["b"]) == [(0, 100), (1000, 100), (1000, 150), (0, 150)]
    assert "b" not in paths(replace(CHART, curves=[curve([50, 50])]))


@given(st.lists(st.floats(0, 100), min_size=2, max_size=80))
def test_a_still_line_has_few_points_and_is_nowhere_off_by_a_pixel(y: list[float]):
    line = paths(replace(CHART, curves=[curve(y)]))["l"]
    drawn = points(line) or [(0, 0)]
    across, up = zip(*drawn, strict=True)
    x, expected = np.linspace(0, 1000, len(y)), 250 * (1 - np.array(y) / 100)
    off = [np.abs(np.interp(x + shift, across, up) - expected) for shift in np.linspace(-0.5, 0.5, 11)]  # by rounding
    assert np.min(off, axis=0).max() < 1.5 + 1.0
    assert len(points(paths(replace(CHART, curves=[curve(np.linspace(0, 90, 50).tolist())]))["l"])) == 2


@pytest.mark.parametrize(
    ("values", "decimals", "short"),
    [
        ([63.2712, 0.012345, 0.0, 12345.6], 1, [63.3, 0.0123, 0, 12345.6]),
        ([0.693147, 0.6925], 6, [0.693147, 0.6925]),
        ([NAN, np.inf, -1234.5], -2, [None, None, -1230]),
    ],
)
def test_figures_are_as_exact_as_they_can_be_seen(values: list[float], decimals: int, short: list[float | None]):
    assert _figures(np.array(values), decimals) == short


def test_levels_phases_and_notes_have_their_place():
    chart = replace(
        CHART,
        levels=[LevelLine("most", 75.0, "bad", "dashed", "75 %")],
        spans=[Stretch(2.0, 4.0, "validate"), Stretch(9.0, 9.0, "validate")],
        notes=[Note(5.0, 50.0, "<b>", "bad", until=7.0)],
    )
    assert paths(chart)["l dashed"] == "M0 62h1000"
    assert paths(chart)["s"] == "M200 250H400M900 250H901"
    assert 'class="n above ruler" style="left:50%;bottom:50%;color:var(--bad);width:20%"><b>&lt;b&gt;</b>' in chart.svg


def test_it_is_well_formed_told_in_words_and_the_same_each_time():
    chart = replace(CHART, curves=[curve([1, 2, NAN, 3])], told='<b> & "quoted"\x1b')
    svg = re.search(r"<svg.*?</svg>", chart.svg)
    assert svg is not None
    assert ElementTree.fromstring(svg[0]).attrib["aria-label"] == '<b> & "quoted"\\x1b'
    assert chart.svg == chart.svg


def test_nothing_to_draw_is_an_empty_chart():
    for y in ([], [NAN], [np.inf, -np.inf]):
        assert "NaN" not in replace(CHART, curves=[curve(y), curve(y, kind="area"), curve(y, kind="dots")]).svg.replace(
            "nan", "NaN"
        )


@given(st.floats(-1e12, 1e12), st.floats(1e-9, 1e12), st.integers(3, 8))
def test_ticks_are_few_even_and_within(low: float, span: float, most: int):
    ticks = nice_ticks(low, low + span, most)
    assert len(ticks) <= most
    assert all(
        low - 1e-6 * span - 1e-3 <= tick <= low + span * (1 + 1e-6) + 1e-3 for tick in ticks
    ) or span < 1e-6 * abs(low)
    if span > 1e-6 * abs(low):
        assert np.ptp(np.diff(ticks)) <= 1e-3 * span if len(ticks) > 2 else True


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (0.25, "0.25"), (1500, "1500"), (25_000, "25k"), (3e6, "3M"), (2.5e9, "2.5G")]
)
def test_a_number_of_an_axis_is_short(value: float, text: str):
    assert show_tick(value) == text


def test_a_logarithmic_axis_has_powers_of_ten():
    axis = Axis(1e-5, 1e-1, "lr", "log")
    assert [text for _, text in axis.ticks()] == ["1e-05", "0.0001", "0.001", "0.01", "0.1"]
    assert axis.placed(np.array([1e-3])) == pytest.approx([0.5])


def test_limits_hold_all_that_is_finite():
    assert limits(np.array([1.0, NAN, 3.0, np.inf]), 0.5) == (0.0, 4.0)
    assert limits(np.array([NAN])) == (0.0, 1.0)
    low, high = limits(np.array([2.0]))
    assert low < 2 < high


def test_bars_share_a_scale():
    html = bars(
        [Bar("A<", [("one", 3.0, "wait"), ("two", 1.0, "copy")], "4 ms"), Bar("B", [("one", 2.0, "wait")])], "told"
    )
    assert re.findall(r"width:([\d.]+)%", html) == ["75", "25", "50"]
    assert "A&lt;" in html
    assert 'aria-label="told"' in html
