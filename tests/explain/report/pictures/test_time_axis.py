"""Pictures of a run share an axis; phases are shaded where they were, however short."""

from dataclasses import replace

import numpy as np
import pytest

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_tables import PHASES
from wellfed.explain.report.pictures.picture_parts import TimeAxis
from wellfed.observe.telemetry.series import HOST
from wellfed.record.entries import RunRecord


def evidence(phases: list[str], interval_s: float = 1.0, saved_s: tuple[float, ...] = ()) -> Evidence:
    at_s = interval_s * np.arange(1, len(phases) + 1)
    codes = np.array([PHASES.index(phase) if phase in PHASES else np.nan for phase in phases])
    events = [{"kind": "checkpoint", "step": 1, "time_s": time_s} for time_s in saved_s]
    watched = {HOST: {"time_s": at_s, "phase": codes}} if phases else {}
    return Evidence(RunRecord("r", events=events), watched=watched)


def test_a_phase_is_shaded_where_it_ended_not_where_it_was_read() -> None:
    of = evidence(["train", "validate", "validate", "ceiling"] * 25, interval_s=1.0, saved_s=(52.0,))
    of.record.phases = {
        "validate": {"total_s": 4.0, "times": 2},
        "checkpoint": {"total_s": 1.0, "times": 1},
        "test": {"total_s": 0.01, "times": 1},
    }
    axis = TimeAxis.of(replace(of, ended={"val": np.array([20.0, 50.0]), "test": np.array([70.0])}))
    assert axis.strip[:3] == [(18, 20, "validate"), (48, 50, "validate"), (51, 52, "checkpoint")]
    assert axis.strip[3:] == [(pytest.approx(69.99), 70, "test")]
    assert [key.text for key in axis.keys] == ["validate", "checkpoint", "test"]


def test_what_is_too_close_to_be_told_apart_is_joined() -> None:
    axis_of = evidence(["train"] * 1000, saved_s=(100.0, 100.5, 101.0, 500.0))
    axis_of.record.phases = {"validate": {"total_s": 100.0, "times": 1000}}
    axis_of.record.phases["checkpoint"] = {"total_s": 2.0, "times": 4}
    axis = TimeAxis.of(axis_of)
    assert axis.strip == [(99.5, 101.0, "checkpoint"), (499.5, 500.0, "checkpoint")]
    often = TimeAxis.of(replace(axis_of, ended={"val": np.arange(0.0, 1000.0)}))
    assert [phase for *_, phase in often.strip].count("validate") == 1


def test_without_a_table_there_is_an_axis() -> None:
    for phases in ([], ["train"]):
        axis = TimeAxis.of(evidence(phases))
        assert axis.end_s > axis.begin_s
