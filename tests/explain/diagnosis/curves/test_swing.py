"""Curves and step times with planted swings, and noise that has none."""

import numpy as np
import pytest

from tests.kit.few import slow
from wellfed.explain.diagnosis.curves.swing import swing_in_time, swings_in_steps
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.record import RunRecord

LAGS = {
    "loader.num_workers": 4,
    "trainer.log_every_steps": 10,
    "trainer.checkpoint_every_steps": 25,
    "steps of an epoch": 40,
    "trainer.validate_every_steps": 60,
}


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


def loader(rng, *, workers, build_ms, step_ms, steps=240, jitter=0.1, restart_ms=0.0, epoch=0):
    """Wait and the rest of each step with a DataLoader whose workers take turns, two batches ahead each."""
    now_ms, free_ms, taken_ms, waits, rests = 0.0, np.zeros(workers), np.zeros(steps), [], []
    for step in range(steps):
        if epoch and step % epoch == 0:
            free_ms[:] = now_ms + restart_ms
        room = step - 2 * workers
        may_begin_ms = taken_ms[room] if room >= 0 and (not epoch or room // epoch == step // epoch) else 0.0
        free_ms[step % workers] = max(free_ms[step % workers], may_begin_ms) + build_ms * (
            1 + jitter * rng.uniform(-1, 1)
        )
        waits.append(max(0.0, free_ms[step % workers] - now_ms))
        taken_ms[step] = now_ms + waits[-1]
        rests.append(abs(step_ms * (1 + 0.05 * rng.normal())))
        now_ms = taken_ms[step] + rests[-1]
    return np.array(waits), np.array(rests)


def planted(rng, cause, jitter):
    lags = dict(LAGS)
    if cause == "lockstep":
        wait_ms, rest_ms = loader(rng, workers=4, build_ms=100, step_ms=8, jitter=jitter)
    elif cause == "restart":
        wait_ms, rest_ms = loader(rng, workers=4, build_ms=20, step_ms=12, jitter=jitter, restart_ms=150, epoch=40)
    elif cause == "starved":
        lags["loader.num_workers"] = 1
        wait_ms, rest_ms = loader(rng, workers=1, build_ms=100, step_ms=8, jitter=jitter)
    else:
        wait_ms, rest_ms = loader(rng, workers=4, build_ms=20, step_ms=20, jitter=jitter)
    for name, lag, more_ms in (("logging", 10, 30), ("checkpoint", 25, 150)):
        if name == cause:
            rest_ms[lag - 1 :: lag] += more_ms * (1 + jitter * rng.uniform(-1, 1, len(rest_ms) // lag))
    return wait_ms, rest_ms, lags


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


def test_a_smooth_swing_and_one_with_readings_missing_are_found():
    rng = np.random.default_rng(3)
    time_s = np.arange(0, 120, 0.5)
    smooth = 60 + 25 * np.sin(2 * np.pi * time_s / 8) + rng.normal(0, 8, len(time_s))
    assert swing_in_time(time_s, smooth).period_s == pytest.approx(8, rel=0.05)
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
    assert swings_in_steps(np.ones(39), np.ones(39), LAGS) == []


@pytest.mark.parametrize(
    ("cause", "lag", "where"),
    [("lockstep", 4, "wait"), ("restart", 40, "wait"), ("logging", 10, "step"), ("checkpoint", 25, "step")],
)
@pytest.mark.parametrize(("jitter", "least"), [(0.1, 0.95), (0.4, 0.8)])
def test_the_setting_behind_a_swing_of_steps_is_named(cause, lag, where, jitter, least):
    rng = np.random.default_rng(6)
    right = 0
    for _ in range(20):
        found = swings_in_steps(*planted(rng, cause, jitter))
        right += bool(found) and (found[0].lag, found[0].where) == (lag, where)
    assert right / 20 >= least


def test_several_swings_are_told_at_once():
    rng = np.random.default_rng(7)
    wait_ms, rest_ms = loader(rng, workers=4, build_ms=20, step_ms=12, steps=400, restart_ms=150, epoch=40)
    rest_ms[24::25] += 150
    found = swings_in_steps(wait_ms, rest_ms, LAGS)
    assert {(each.lag, each.where, each.settings) for each in found} == {
        (40, "wait", ("steps of an epoch",)),
        (25, "step", ("trainer.checkpoint_every_steps",)),
    }
    assert {each.lag: each.amplitude_ms for each in found}[25] == pytest.approx(150, rel=0.2)


@pytest.mark.parametrize("cause", ["healthy", "starved"])
def test_healthy_and_evenly_starved_steps_have_no_swing(cause):
    rng = np.random.default_rng(8)
    for jitter in (0.0, 0.1, 0.4) * 5:
        assert swings_in_steps(*planted(rng, cause, jitter)) == []


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


def test_a_run_s_files_tell_its_swing_with_what_implies_it(tmp_path):
    wait_ms, rest_ms = loader(np.random.default_rng(9), workers=4, build_ms=100, step_ms=8, jitter=0.1)
    write_steps(tmp_path, wait_ms, rest_ms)
    found = find_swing(record_of(), tmp_path)
    assert (found["period_steps"], found["cause"]) == (4, "loader.num_workers")
    assert found["period_s"] == pytest.approx(0.1, rel=0.15)
    assert found["r2"] > 0.3


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
    assert found == {"period_steps": None, "cause": None, "r2": None}


def test_without_files_or_with_few_steps_there_is_no_swing(tmp_path):
    assert find_swing(record_of(), tmp_path) is None
    write_steps(tmp_path, np.ones(3), np.ones(3))
    assert find_swing(RunRecord("run"), tmp_path) is None
    (tmp_path / "steps.csv").write_text("step,wait_ms\n1,4\n2")
    assert find_swing(RunRecord("run"), tmp_path) is None


def uneven(rng, number):
    """Step times and pauses without a period."""
    kind = rng.choice(["even", "slow", "spiky"])
    if kind == "even":
        rest_ms = 12 * np.abs(1 + rng.uniform(0.05, 0.5) * rng.normal(size=number))
    elif kind == "slow":
        rest_ms = np.maximum(0, noise(rng, number)[1] / 50 * 12)
    else:
        rest_ms = 12 + rng.exponential(60, number) * (rng.random(number) < rng.uniform(0.02, 0.2))
    wait_ms = np.maximum(0, noise(rng, number)[1] / 50 * rng.choice([0.1, 5, 20]))
    return wait_ms, rest_ms, LAGS, np.where(rng.random(number) < 0.02, 100 * rng.random(number), 0.0)


@pytest.mark.parametrize("series", [20, slow(200)])
def test_uneven_steps_have_no_swing(series):
    rng = np.random.default_rng(12)
    lags = {name: lag for name, lag in LAGS.items() if name != "steps of an epoch"} | {"epoch": 40}
    for _ in range(series):
        wait_ms, rest_ms, _, gap_ms = uneven(rng, int(rng.integers(60, 500)))
        assert swings_in_steps(wait_ms, rest_ms, lags, gap_ms) == []


def test_pauses_between_steps_are_told_by_what_training_stands_still_for():
    gap_ms = np.zeros(240)
    gap_ms[20::20] = 150.0
    lags = {"trainer.log_every_steps": 10, "trainer.checkpoint_every_steps": 20}
    found = swings_in_steps(np.zeros(240), np.full(240, 12.0), lags, gap_ms)
    assert [(each.lag, each.where) for each in found] == [(20, "gap")]
    once = np.zeros(240)
    once[2] = 1000.0
    assert swings_in_steps(np.zeros(240), np.full(240, 12.0), {"epoch": 25}, once) == []


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
    assert exact.steps.period_s(25) == pytest.approx(0.33)
    assert Evidence(record, columns).steps.gap_ms == pytest.approx(np.zeros(200))
