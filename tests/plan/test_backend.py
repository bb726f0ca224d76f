"""The backend that ``auto`` takes, from recorded times."""

import dataclasses

import pytest

from tests.kit.machines import H200, LAPTOP, machine
from tests.plan.test_decide import FETCH, ITEMS, check_reasons, config, planned
from wellfed.config.schema import Backend, LoaderConfig
from wellfed.data.backends.first_batches import FirstBatches
from wellfed.explain.diagnosis.gains.feeding import Feeding
from wellfed.plan.backend import TIMED_LATER, candidates, to_time
from wellfed.units import show_ms


def trial(build_ms=2.0, failed=(), batch_bytes=1000, step_ms=None, **lost_ms):
    """Times of backends are given without the step, of 2 ms unless batches take longer."""
    timed = {name: max(1.0, build_ms) + lost for name, lost in lost_ms.items()}
    return FirstBatches(build_ms, batch_bytes, 1000, step_ms, timed, failed)


def backend(found, loader=None, *, data=FETCH, facts=H200):
    plan = planned(config(loader=loader or {}), facts, data=data, trial=found)
    check_reasons(plan)
    return plan.knobs["loader.backend"]


@pytest.mark.parametrize(
    ("loader", "data", "expected"),
    [
        ({}, FETCH, ("inline", "threads", "processes")),
        ({}, ITEMS, ("inline", "processes")),
        ({"num_workers": 0}, FETCH, ("inline",)),
        ({"num_workers": 0}, ITEMS, ("inline", "torch")),
        ({"num_workers": 2}, FETCH, ("threads", "processes")),
        ({"num_workers": 2}, ITEMS, ("processes",)),
        ({"prefetch_factor": 4}, FETCH, ("threads", "processes")),
        ({"prefetch_factor": 4}, ITEMS, ("processes", "inline")),
        ({"backend": Backend.threads}, FETCH, ()),
        ({"max_skipped": 1}, FETCH, ("inline", "threads", "processes")),
    ],
)
def test_what_auto_may_take_and_who_wins_a_tie(loader, data, expected):
    assert candidates(LoaderConfig(**loader), data) == expected


@pytest.mark.parametrize(
    ("build_ms", "step_ms", "names", "expected"),
    [
        (0.049, None, ("inline", "threads", "processes"), ()),
        (0.05, None, ("inline", "threads", "processes"), ("inline", "threads")),
        (1.0, None, ("inline", "threads", "processes"), ("inline", "threads", "processes")),
        (249, None, ("inline", "processes"), ("inline", "processes")),
        (251, None, ("inline", "processes"), ()),
        (77, 15, ("inline", "processes"), ("inline", "processes")),
        (77, 200, ("inline", "processes"), ()),  # takes seconds
        (5, 101, ("inline", "processes"), ()),  # hardly anything of a step
        (0.5, None, ("inline", "processes"), ()),
        (0.5, None, ("inline", "torch"), ("inline", "torch")),
        (5, None, ("processes",), ()),
    ],
)
def test_what_is_worth_timing(build_ms, step_ms, names, expected):
    assert to_time(names, trial(build_ms, step_ms=step_ms)) == expected


@pytest.mark.parametrize(
    ("found", "loader", "data", "expected"),
    [
        # Ties, within 10 % of a step with its loss, go to the simpler.
        (trial(inline=2.0, threads=1.7), {}, FETCH, "inline"),
        (trial(inline=2.0, threads=1.5), {}, FETCH, "threads"),
        (trial(inline=2.0, threads=0.3, processes=0.1), {}, FETCH, "threads"),
        # The fastest is taken, wherever it is named.
        (trial(processes=355.0, inline=168.0), {"prefetch_factor": 8}, ITEMS, "inline"),
        (trial(inline=2.0, threads=1.9, processes=0.4), {}, FETCH, "processes"),
        (trial(inline=2.0, threads=2.4, processes=3.0), {}, FETCH, "inline"),
        (trial(inline=2.0, processes=0.5), {}, ITEMS, "processes"),
        (trial(inline=2.0, processes=2.5), {}, ITEMS, "inline"),
        (trial(inline=2.0, torch=1.9), {"num_workers": 0}, ITEMS, "inline"),
        # What was asked for wins a tie; so many workers are never given up.
        (trial(threads=2.0, processes=2.2), {"num_workers": 3}, FETCH, "threads"),
        (trial(threads=4.0, processes=0.2), {"num_workers": 3}, FETCH, "processes"),
        (trial(processes=2.2, inline=2.0), {"prefetch_factor": 4}, ITEMS, "processes"),
        (trial(processes=5.2, inline=2.0), {"prefetch_factor": 4}, ITEMS, "inline"),
        (trial(0.3), {"prefetch_factor": 4}, ITEMS, "inline"),
        # One batch said enough.
        (trial(0.04), {}, FETCH, "inline"),
        (trial(0.3), {}, ITEMS, "inline"),
        (trial(0.04), {"num_workers": 2}, FETCH, "threads"),
        (trial(300), {}, FETCH, "threads"),
        (trial(300), {}, ITEMS, "processes"),
        (trial(2, step_ms=100), {}, ITEMS, "inline"),
        (trial(90, step_ms=200), {}, ITEMS, "processes"),
        (trial(inline=2.0, threads=1.9, failed=("processes",)), {}, FETCH, "inline"),
    ],
)
def test_the_backend_by_measured_times(found, loader, data, expected):
    chosen = backend(found, loader, data=data)
    assert (chosen.value, chosen.source) == (expected, "measured")


def test_without_first_batches_the_plan_says_that_a_run_measures():
    plan = planned(config(), machine(cores=2.0), data=ITEMS)
    assert (plan.loader.backend, plan.loader.num_workers) == ("processes", 2)
    assert TIMED_LATER in plan.knobs["loader.backend"].because


@pytest.mark.parametrize("option", ["auto", "balanced", "aggressive"])
@pytest.mark.parametrize(
    ("build_ms", "step_ms", "cores", "expected"),
    [
        (77, 15, 2, 2),  # two workers and the step share two cores
        (77, 15, 64, 4),
        (77, 400, 2, 1),
        (77, 60, 64, 3),  # two keep up, and one more since batches take unequal times
        (5, 60, 64, 2),
    ],
)
def test_as_many_workers_as_the_finding_would_advise(option, build_ms, step_ms, cores, expected):
    found = trial(build_ms, step_ms=step_ms, inline=99, processes=0)
    given, facts = config(loader={"backend": Backend.processes}), machine(cores=float(cores))
    count = planned(given, facts, data=ITEMS, trial=found, choices={"loader": option}).loader.num_workers
    if option == "balanced":
        assert count == min(4, expected)
    else:
        assert count >= expected
    run = Feeding(
        step_ms=step_ms + build_ms, fed_ms=step_ms, build_ms=build_ms, build_cpu_ms=build_ms, cpu_ms=build_ms + step_ms,
        cores=cores, others=0.0, num_workers=1, most_workers=32, bound=10, is_estimate=False,
    )  # fmt: skip
    assert count >= min(run.workers_advised, 4 if option == "balanced" else 16)


@pytest.mark.parametrize(
    ("build_ms", "cores", "expected"), [(1.0, 64.0, 2), (2.5, 64.0, 4), (2.5, 2.0, 2), (90, 64.0, 8), (300, 4.0, 4)]
)
@pytest.mark.parametrize("name", ["threads", "processes"])
def test_no_more_workers_than_are_of_use(name, build_ms, cores, expected):
    given = config(loader={"backend": Backend[name]})
    count = planned(given, machine(cores=cores), trial=trial(build_ms)).knobs["loader.num_workers"]
    assert count.value == expected
    assert count.source == ("measured" if expected < min(8, cores) else "predicted")
    if count.source == "measured":
        assert show_ms(build_ms) in count.because
    asked = config(loader={"backend": Backend[name], "num_workers": 3})
    assert planned(asked, machine(cores=64.0), trial=trial(build_ms)).loader.num_workers == 3


def test_what_does_not_fit_is_not_taken():
    facts = dataclasses.replace(LAPTOP, shm_free_gib=0.0625)  # Docker's own
    big = trial(inline=20.0, processes=0.1, batch_bytes=40 * 2**20)
    chosen = backend(big, data=ITEMS, facts=facts)
    assert (chosen.value, chosen.because.rpartition("; ")[2]) == ("inline", "no room for processes")
    assert backend(big, data=ITEMS).value == "processes"
    assert backend(trial(300, batch_bytes=40 * 2**20), data=ITEMS, facts=facts).value == "inline"
