"""A picture a metric: splits together, single values as points, what is not finite in words."""

from typing import Any

import numpy as np
import pytest

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.pages.chart import PagePicture
from wellfed.explain.report.pictures.picture_parts import TimeAxis
from wellfed.explain.report.pictures.run_pictures import metrics
from wellfed.record.entries import RunRecord

STEPS = np.arange(1.0, 11.0)


def drawn(curves: Any, **tables: Any) -> list[PagePicture]:
    evidence = Evidence(RunRecord("r"), metrics=curves, **tables)
    return list(metrics(evidence, TimeAxis.of(evidence)))


def test_splits_of_a_metric_are_in_one_picture() -> None:
    curves = {
        ("val", "loss"): (STEPS, 2 / STEPS),
        ("train", "loss"): (STEPS, 1 / STEPS),
        ("test", "acc"): (STEPS, STEPS),
    }
    found = drawn(curves)
    assert [one.title for one in found] == ["loss", "acc"]
    assert [key.text for key in found[0].keys] == ["train 0.1", "val 0.2"]


def test_a_metric_that_was_told_once_and_figures_of_speed_have_none() -> None:
    once = (STEPS[:1], STEPS[:1])
    curves = {("test", "acc"): once, ("throughput", "samples_per_s"): (STEPS, STEPS)}
    assert drawn(curves) == []


def test_gaps_are_told() -> None:
    values = np.where(np.isin(STEPS, (3, 5)), np.nan, STEPS)
    curves = {("train", "a$_{b}$"): (STEPS, values), ("val", "none"): (STEPS, np.full(10, np.inf))}
    some, none = drawn(curves)
    assert some.caption == "train is not finite in 2 of 10 rows, first at step 3"
    assert none.caption == "val is not finite in 10 of 10 rows, first at step 1"
    assert none.keys[0].text == "val not finite"


def test_metrics_share_the_time_axis_of_the_run_where_it_is_known() -> None:
    steps = {"step": np.arange(1.0, 21.0), "time_s": 100 + 2 * np.arange(1.0, 21.0)}
    curves = {("val", "loss"): (np.array([5.0, 10.0]), np.array([2.0, 1.0]))}
    ((chart,),) = (one.charts for one in drawn(curves, all_steps=steps))
    assert chart.is_linked
    assert chart.curves[0].x == pytest.approx([110, 120])
    ((chart,),) = (one.charts for one in drawn(curves))
    assert (chart.is_linked, chart.axis.title) == (False, "step")
    assert chart.curves[0].x == pytest.approx([5, 10])
