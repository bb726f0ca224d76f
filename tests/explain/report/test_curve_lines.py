"""What is said of curves from a CSV, and of what they can't tell."""

import dataclasses
import json

import numpy as np

from tests.explain.diagnosis.curves.test_swing import wave
from wellfed.explain.diagnosis.curves.curve_verdict import CAUSES, curve_entry, curve_lines
from wellfed.explain.diagnosis.curves.recorded_curves import GpuCurve, RecordedCurves
from wellfed.record import plain


def curves(*utils, interval_s=1.0, unread=0, card="", writer="nvidia-smi"):
    made = [
        GpuCurve(str(number), card, interval_s * np.arange(len(util)), np.array(util))
        for number, util in enumerate(utils)
    ]
    return RecordedCurves(writer, tuple(made), interval_s, unread)


def swinging(period_s, interval_s, duration_s=200):
    time_s, values, _ = wave(np.random.default_rng(1), period_s=period_s, interval_s=interval_s, duration_s=duration_s)
    return RecordedCurves("nvidia-smi", (GpuCurve("0", "", time_s, np.clip(values, 0, 100)),), interval_s, 0)


def test_each_gpu_has_a_line_with_its_verdict_and_each_verdict_its_advice():
    lines = curve_lines(curves([90.0] * 60, [20.0] * 60, [21.0] * 60, card="NVIDIA H200", unread=2))
    about = (
        "Written by nvidia-smi, 3 GPUs, 180 readings, one of each GPU every 1.0 s, 2 rows left out that can't be read"
    )
    assert lines[0] == about
    assert lines[1].startswith(
        "GPU 0 (NVIDIA H200): utilisation 90 % on average: well used (p5 90 %, p95 90 %, peak 90 %"
    )
    assert lines[2].startswith("GPU 1 (NVIDIA H200): utilisation 20 % on average: starved")
    assert len([line for line in lines if "To know what it waits for" in line]) == 1
    assert len([line for line in lines if "Busy is not yet fast" in line]) == 1
    assert CAUSES in lines


def test_a_gpu_without_utilisation_is_said():
    lines = curve_lines(curves([50.0] * 60, []))
    assert "GPU 1: no utilisation was read" in lines[2]


def test_a_gpu_that_did_nothing_starves_for_nobody():
    lines = curve_lines(curves([0.0] * 60))
    assert lines[1:] == ["GPU 0: nothing ran on it (over 59.0 s)", CAUSES]


def test_a_coarse_curve_does_not_show_fast_swings_and_says_so():
    said = "Readings 1.0 s apart can't show a period under 3.0 s"
    assert any(said in line for line in curve_lines(curves([20.0] * 60)))
    assert any("under 3.0 s" in line for line in curve_lines(swinging(4.0, 1.0)))
    assert not any("can't show" in line for line in curve_lines(swinging(12.0, 1.0)))
    assert not any("can't show" in line for line in curve_lines(curves([20.0] * 60, interval_s=0.5)))
    assert not any("can't show" in line for line in curve_lines(curves([95.0] * 60)))


def test_too_few_readings_are_said():
    assert any("from 40 readings of a GPU on: watch for longer" in line for line in curve_lines(curves([20.0] * 39)))
    assert curve_lines(curves([20.0]))[0].startswith("Written by nvidia-smi, 1 GPU, 1 reading")


def test_rows_from_before_the_clock_was_set_back_are_told_apart_from_damaged_ones():
    file = dataclasses.replace(curves([50.0] * 60), out_of_order=5)
    assert "5 rows left out because the clock went back" in curve_lines(file)[0]
    assert "can't be read" not in curve_lines(file)[0]


def test_the_same_as_plain_data():
    entry = json.loads(json.dumps(plain(curve_entry(swinging(9.5, 0.5)))))
    gpu = entry["gpus"]["0"]
    assert (gpu["verdict"], round(gpu["swing"]["period_s"], 1)) == ("swings", 9.5)
    assert {"mean_pct", "p5_pct", "p95_pct", "peak_pct", "num", "span_s", "message", "advice", "name"} <= set(gpu)
    assert entry["notes"] == [CAUSES]
    assert curve_entry(curves([]))["gpus"] == {"0": None}


def test_a_curve_is_judged_as_the_monitor_judges_it():
    lines = curve_lines(curves([0.0] * 60 + [90.0] * 80 + [0.0] * 60, [50.0]))
    assert lines[1].startswith("GPU 0: utilisation 36 % on average: starved (")
    assert lines[2] == "  while it was in use, for 1 min 19 s: utilisation 90 % on average: well used"
    assert lines[3] == "GPU 1: 1 reading, too few for a verdict"
    assert lines[-1].startswith("Busy is not yet fast")
