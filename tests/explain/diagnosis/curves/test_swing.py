"""Curves and step times with planted swings, and noise that has none."""

import numpy as np
import pytest

from tests.kit.evidence_of import evidence
from tests.kit.few import slow
from wellfed.explain.diagnosis.curves.swing import swing_in_time
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.record.entries import RunRecord


def wave(rng, *, period_s, interval_s, duration_s, jitter=0.0, duty=0.5, low=9, high=90):
    """Utilisation that jumps between two levels, as it is read; and its mean period."""
    time_s = np.arange(0, duration_s, interval_s)
    time_s += rng.normal(0, 0.02 * interval_s, len(time_s))
    lengths = period_s * (1 + jitter * rng.uniform(-1, 1, 2 * int(duration_s / period_s) + 5))
    edges = np.concatenate([[-1], np.cumsum(lengths)])
    at = np.searchsorted(edges, time_s, side="right") - 1
    phase = (time_s - edges[at]) / np.diff(edges)[at]
    values = np.where(phase < duty, high, low) + rng.normal(0, 5, len(time_s))
    return time_s, values, lengths[1 : max(2, at[-1])].mean()


def noise(rng, number):
    """Utilisation without a period: white, slow, spiky, or cut off at its top."""
    memory, spiky, cut = rng.choice([0, 0.5, 0.9]), rng.random() < 0.5, rng.random() < 0.3
    drawn = rng.standard_t(3, number + 200) if spiky else rng.normal(0, 1, number + 200)
    for place in range(1, len(drawn)):
        drawn[place] += memory * drawn[place - 1]
    values = 50 + 10 * drawn[200:] / drawn.std()
    return 0.5 * np.arange(number), np.clip(values, 0, 60) if cut else values


def test_a_swing_of_nine_and_a_half_seconds_is_told_with_its_period_and_levels():
    time_s, values, _ = wave(np.random.default_rng(1), period_s=9.5, interval_s=0.5, duration_s=95)
    found = swing_in_time(time_s, values)
    assert found is not None
    assert found.period_s == pytest.approx(9.5, rel=0.03)
    assert found.low < 15
    assert found.high > 85


@pytest.mark.parametrize("jitter", [0.0, 0.1, 0.4])
def test_periods_are_found_within_five_percent(jitter):
    rng = np.random.default_rng(2)
    for _ in range(40):
        period_s, interval_s = rng.uniform(3, 20), rng.choice([0.25, 0.5])
        duration_s = period_s * rng.uniform(7, 30)
        like = {"interval_s": interval_s, "duration_s": duration_s, "jitter": jitter}
        time_s, values, mean_s = wave(rng, period_s=period_s, duty=rng.uniform(0.25, 0.75), **like)
        found = swing_in_time(time_s, values)
        assert found is not None
        assert found.period_s == pytest.approx(mean_s, rel=0.05)


def test_a_swing_with_readings_missing_is_found():
    rng = np.random.default_rng(3)
    time_s, values, _ = wave(rng, period_s=9.5, interval_s=0.5, duration_s=120)
    values[rng.random(len(values)) < 0.2] = np.nan
    kept = np.r_[0:90, 120 : len(values)]
    assert swing_in_time(time_s[kept], values[kept]).period_s == pytest.approx(9.5, rel=0.05)


@pytest.mark.parametrize("curves", [30, slow(200)])
def test_noise_has_no_swing(curves):
    rng = np.random.default_rng(4)
    assert [swing_in_time(*noise(rng, int(rng.integers(60, 600)))) for _ in range(curves)] == [None] * curves


def test_steady_curves_have_no_swing():
    time_s = 0.5 * np.arange(300)
    assert swing_in_time(time_s, np.full(300, 20.0)) is None
    assert swing_in_time(time_s, np.linspace(0, 90, 300)) is None


def test_too_little_to_tell_is_no_swing():
    rng = np.random.default_rng(5)
    assert swing_in_time(*wave(rng, period_s=9.5, interval_s=0.5, duration_s=19)[:2]) is None
    assert swing_in_time(*wave(rng, period_s=30, interval_s=0.5, duration_s=100)[:2]) is None
    assert swing_in_time(np.zeros(100), np.arange(100.0)) is None
    assert swing_in_time(np.array([]), np.array([])) is None


def write_steps(folder, wait_ms, rest_ms, epoch=40):
    lines = ["step,time_s,epoch,wait_ms,copy_ms,compute_ms,host_ms"]
    lines += [f"{i},0,{i // epoch},{w},,{r},0" for i, (w, r) in enumerate(zip(wait_ms, rest_ms, strict=True))]
    (folder / "steps.csv").write_text("\n".join(lines) + "\n")


def find_swing(record, folder):
    evidence = Evidence.of(record, folder)
    return evidence.swings.entry()


def record_of(**settings):
    plan = {"loader.num_workers": {"value": 4, "because": "", "source": "set"}}
    trainer = {"log_every_steps": 10, "checkpoint_every_steps": 25, "validate_every_steps": None, **settings}
    return RunRecord("run", plan=plan, config={"trainer": trainer})


def test_the_utilisation_tells_a_swing_that_no_step_shows(tmp_path):
    rng = np.random.default_rng(10)
    write_steps(tmp_path, np.zeros(100), rng.normal(20, 1, 100))
    time_s, values, _ = wave(rng, period_s=9.5, interval_s=0.5, duration_s=95)
    rows = ["time_s,phase,gpu,util_pct", "0,start,0,1"]
    rows += [
        f"{at},train,{gpu},{value if gpu == 0 else 50}"
        for at, value in zip(time_s, values, strict=True)
        for gpu in (-1, 0, 1)
    ]
    (tmp_path / "telemetry.csv").write_text("\n".join(rows) + "\n")
    found = find_swing(record_of(), tmp_path)
    assert found.pop("period_s") == pytest.approx(9.5, rel=0.03)
    assert found == {"cause": None}


def test_without_files_or_with_few_steps_there_is_no_swing(tmp_path):
    assert find_swing(record_of(), tmp_path) is None
    write_steps(tmp_path, np.ones(3), np.ones(3))
    assert find_swing(RunRecord("run"), tmp_path) is None
    (tmp_path / "steps.csv").write_text("step,wait_ms\n1,4\n2")
    assert find_swing(RunRecord("run"), tmp_path) is None


def test_a_gap_is_what_steps_leave_of_the_clock_also_where_the_host_runs_ahead():
    rng = np.random.default_rng(13)
    step_ms, gap_ms = np.full(200, 10.0), np.zeros(200)
    gap_ms[25::25] = 80.0
    ahead_ms = rng.uniform(0, 60, 200)
    ahead_ms[np.arange(200) % 25 == 24] = 0.0  # a checkpoint waits for the device
    columns = {"step": np.arange(1.0, 201), "wait_ms": np.zeros(200), "compute_ms": step_ms}
    ended_ms = np.cumsum(step_ms + gap_ms)
    record = RunRecord("run")
    exact = Evidence(record, {**columns, "time_s": ended_ms / 1e3})
    assert exact.steps.gap_ms == pytest.approx(gap_ms, abs=1e-6)
    hidden = Evidence(record, {**columns, "time_s": (ended_ms - ahead_ms) / 1e3})
    assert hidden.steps.gap_ms.sum() == pytest.approx(gap_ms.sum(), abs=61)
    assert exact.steps.period_s(25) == pytest.approx(0.33, rel=0.05)
    assert Evidence(record, columns).steps.gap_ms == pytest.approx(np.zeros(200))


def test_the_gpu_that_swings_most_is_told():
    rng = np.random.default_rng(3)
    curves = {}
    for gpu, low in ((0, 50), (1, 5)):
        time_s, values, _ = wave(rng, period_s=9.5, interval_s=0.5, duration_s=95, low=low)
        curves[gpu] = {"time_s": time_s, "util_pct": values}
    gpu, swing = evidence(curves=curves, copy_ms=0.0).swings.deepest
    assert (gpu, swing.period_s) == (1, pytest.approx(9.5, rel=0.03))
    assert evidence(copy_ms=0.0).swings.deepest is None


def test_what_is_due_as_often_is_within_a_tenth():
    case = evidence(compute_ms=99.9, config={"trainer": {"log_every_steps": 50, "validate_every_steps": 70}})
    (found,) = case.swings.settings_with_period(5.2)
    assert "trainer.log_every_steps" in found
    assert case.swings.settings_with_period(6.0) == []
