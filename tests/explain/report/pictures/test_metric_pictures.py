"""A picture a metric: splits together, single values as points, what is not finite in words."""

from typing import Any

import numpy as np

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.pages.chart import PagePicture
from wellfed.explain.report.pictures.run_pictures import metrics
from wellfed.record.entries import RunRecord

STEPS = np.arange(1.0, 11.0)


def drawn(curves: Any) -> list[PagePicture]:
    return list(metrics({"": Evidence(RunRecord("r"), metrics=curves)}))


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


def test_two_runs_are_drawn_over_each_other() -> None:
    runs = {letter: Evidence(RunRecord("r"), metrics={("val", "loss"): (STEPS, STEPS)}) for letter in "AB"}
    ((chart,),) = (one.charts for one in metrics(runs))
    assert [curve.name for curve in chart.curves] == ["A val 10", "B val 10"]
    assert chart.axis.title == "step"
