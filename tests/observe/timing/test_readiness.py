import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wellfed.observe.timing.readiness import StepTable, summarise
from wellfed.observe.timing.step_clock import StepRow

durations = st.just(0.0) | st.floats(1e-6, 1e4)


def row(wait=1.0, copy=None, compute=4.0, host=0.0, *, samples=8, asked=0.0, warmup=False, **more):
    return StepRow(1, 0.0, 0, samples, 8, 1, wait, copy, compute, host, asked, warmup, **more)


@given(st.lists(st.tuples(durations, st.none() | durations, durations, durations), min_size=1, max_size=60))
def test_shares_sum_to_one(steps):
    rows = [row(*step) for step in steps]
    found = summarise(rows)
    if sum(each.step_ms for each in rows) == 0:
        assert found is None
        return
    total = (
        found.time["wait_frac"] + (found.time["copy_frac"] or 0) + found.time["compute_frac"] + found.time["host_frac"]
    )
    assert total == pytest.approx(1)
    assert (found.time["copy_frac"] is None) == all(copy is None for _, copy, _, _ in steps)
    assert found.time["step_ms_p50"] <= found.time["step_ms_p95"]
    assert found.samples_per_s * found.time["step_ms_mean"] * found.steps == pytest.approx(
        1e3 * sum(row.samples for row in rows if not row.warmup)
    )
    if found.ci95:
        assert found.ci95[0] <= found.samples_per_s <= found.ci95[1]


def test_figures_of_known_steps():
    rows = [row(5, None, 5, 0, asked=5), row(0, None, 9, 1, asked=0)] * 10
    found = summarise([row(1e6, None, 1e6, warmup=True), *rows])
    assert (found.steps, found.warmup_steps) == (20, 1)
    assert found.samples_per_s == pytest.approx(800)
    assert (found.time["wait_frac"], found.time["compute_frac"], found.time["host_frac"]) == pytest.approx(
        (0.25, 0.7, 0.05)
    )
    assert found.readiness_frac == 0.5
    assert found.time["step_ms_p50"] == found.time["step_ms_p95"] == 10


def test_building_and_launching_are_of_the_same_steps():
    rows = [row(build_ms=10.0 * number, build_cpu_ms=5.0 * number, launch_ms=number) for number in (1, 2, 3)]
    found = summarise([row(build_ms=1e6, build_cpu_ms=0.0, launch_ms=1e6, warmup=True), *rows, row()])
    assert found.time["launch_ms_p50"] == 2
    assert (found.loading["build_ms_mean"], found.loading["build_ms_p50"], found.loading["cpu_frac"]) == pytest.approx(
        (20, 20, 0.5)
    )
    assert 29 < found.loading["build_ms_p99"] <= 30


def test_nothing_but_warm_up_has_no_figures():
    assert summarise([]) is None
    assert summarise([row(warmup=True)]) is None


def test_an_interval_needs_40_steps():
    assert summarise([row()] * 39).ci95 is None
    assert summarise([row()] * 40).ci95 == pytest.approx((1600, 1600))


def test_one_stall_does_not_put_the_rate_outside_its_interval():
    rows = [row(0, None, 10)] * 199 + [row(100_000, None, 10)]
    found = summarise(rows)
    low, high = found.ci95
    assert 0 <= low <= found.samples_per_s <= high


def numbered(first, last, **more):
    return [row(number / 7, None, 4.0, samples=number, **more)._replace(step=number) for number in range(first, last)]


def steps_of(table):
    return StepTable.of(table).column("step").tolist()


def test_a_table_has_the_rows_that_were_added():
    rows = [row(), row(copy=2.5, build_ms=1.0, build_cpu_ms=0.5, slowest_index=2**40, warmup=True), *numbered(3, 90)]
    table = StepTable(most=1000)
    for start in range(0, len(rows), 7):
        table.extend(rows[start : start + 7])
    np.testing.assert_array_equal(table.figures, np.array(rows, float))  # None is nan
    assert len(table) == len(rows)
    assert summarise(table) == summarise(rows)


def test_a_table_keeps_the_latest_rows():
    table = StepTable(most=50)
    for start in range(0, 400, 40):
        table.extend(numbered(start, start + 40))
        assert steps_of(table) == list(range(max(0, start - 10), start + 40))
    table.extend(numbered(400, 600))
    assert steps_of(table) == list(range(550, 600))
    assert len(table) == 50
