"""The search against machines whose costs are made up, and what it must never do."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.few import slow
from tests.kit.made_machine import GRID, MadeMachine
from wellfed.record.entries import FindingEntry
from wellfed.study.points.guided.change import Change, TuneTrial, knob_of, same_plan, with_overrides
from wellfed.study.points.guided.moves import TuneMachine
from wellfed.study.points.guided.propose import GuidedPoints
from wellfed.study.points.guided.steps import TuneBudget

ROOM = TuneBudget(20, 3600.0)
SEEDS = st.integers(0, 10**6)
STARTS = st.integers(0, 4)
KNOBS = (
    *("loader.backend", "loader.num_workers", "loader.prefetch_factor", "loader.device_prefetch", "loader.pin_memory"),
    *("memory.features", "memory.accumulate", "memory.micro_batch", "gpu.compile", "loader", "memory", "gpu"),
)


def searched(made: MadeMachine, start: Sequence[str], **more: Any) -> GuidedPoints:
    search = GuidedPoints(more.pop("budget", ROOM), TuneMachine(made.cores, made.has_card), **more)
    while (change := search.next()) is not None:
        search.ended(change, made.run(with_overrides(start, change.overrides)))
    return search


def of_the_grid(made: MadeMachine) -> tuple[float, float]:
    """The true rate of the point that the grid takes for its best, and the seconds of all its trials."""
    ran = {point: found for point in GRID if (found := made.rate(point)) is not None}
    best = max(ran, key=lambda point: made.noisy(point, ran[point][0]))
    return ran[best][0], sum(seconds for _, seconds in ran.values())


def is_as_good_and_short(seed: int, start: int) -> bool:
    made = MadeMachine.draw(seed)
    words = [*made.starts()][start]
    search, (best_rate, seconds) = searched(made, words), of_the_grid(made)
    assert search.best is not None
    found = made.rate(with_overrides(words, search.best.change.overrides))
    assert found is not None
    return found[0] >= 0.95 * best_rate and search.spent_seconds <= 0.3 * seconds and len(search.steps) <= 15


def test_it_finds_nearly_what_the_grid_finds_in_a_fraction_of_its_time() -> None:
    good = [is_as_good_and_short(seed, seed % 5) for seed in range(15)]
    assert sum(good) >= 14


@pytest.mark.slow
def test_it_does_so_on_hundreds_of_machines() -> None:
    good = [is_as_good_and_short(seed, start) for seed in range(1000, 1060) for start in range(5)]
    assert sum(good) >= 0.95 * len(good)


def working(trial: TuneTrial) -> dict[str, Any]:
    """Planned values of the knobs that do anything."""
    return dict(same_plan({knob: entry["value"] for knob, entry in trial.plan.items()}))


@given(SEEDS, STARTS, st.frozensets(st.sampled_from(KNOBS), max_size=4), st.integers(1, 8), st.floats(1, 300))
@settings(max_examples=15)
def test_it_ends_within_its_budget_and_leaves_alone_what_is_fixed(
    seed: int, start: int, fixed: frozenset[str], max_trials: int, max_seconds: float
) -> None:
    made = MadeMachine.draw(seed)
    words = [*made.starts()][start]
    search = searched(made, words, fixed=fixed, budget=TuneBudget(max_trials, max_seconds))
    steps = search.steps
    assert search.ended_because
    assert 1 <= len(steps) <= max_trials
    # Each trial was begun while there was time for the usual one.
    before_last = [step.trial.seconds for step in steps[:-1]]
    assert sum(before_last) <= max_seconds or len(steps) == 1
    tried = [frozenset(step.change.overrides) for step in steps]
    assert len(set(tried)) == len(tried)
    turned = {knob_of(word) for step in steps for word in step.change.turned}
    assert {knob.partition(".")[0] for knob in turned} <= {"loader", "memory", "gpu"}
    assert not turned & fixed
    assert not {knob.partition(".")[0] for knob in turned} & fixed
    planned = [working(step.trial) for step in steps if step.is_kept]
    assert all(each[knob] == planned[0][knob] for each in planned for knob in fixed & each.keys() & planned[0].keys())
    kept = [step.trial.figure or 0.0 for step in steps if step.is_kept]
    assert all(later >= 1.02 * earlier for earlier, later in pairwise(kept))


def finding(*change: str, learns: bool = False, name: str = "too_few_workers") -> FindingEntry:
    return {
        **{
            "id": name,
            "severity": "high",
            "message": f"says {name}",
            "advice": "",
            "evidence": {},
            "gain": None,
            "text": "",
        },
        "change": list(change),
        "changes_learning": learns,
    }  # type: ignore[typeddict-item]


def measured(figure: float, *findings: FindingEntry, half: float = 0.01, **more: Any) -> TuneTrial:
    return TuneTrial("ok", figure, (figure * (1 - half), figure * (1 + half)), 1.0, findings=findings, **more)


def begun(start: TuneTrial, **more: Any) -> GuidedPoints:
    search = GuidedPoints(more.pop("budget", ROOM), TuneMachine(2, on_gpu=False), **more)
    change = search.next()
    assert change == Change((), "the start")
    search.ended(change, start)
    return search


def tell_next(search: GuidedPoints, trial: TuneTrial) -> Change:
    change = search.next()
    assert change is not None
    search.ended(change, trial)
    return change


def test_findings_lead_in_their_order_and_those_of_what_was_kept_come_next() -> None:
    search = begun(measured(100, finding("loader.num_workers=2"), finding("loader.prefetch_factor=4", name="uneven")))
    assert tell_next(search, measured(101)).overrides == ("loader.num_workers=2",)
    kept = measured(150, finding("loader.num_workers=3"))
    assert tell_next(search, kept).overrides == ("loader.prefetch_factor=4",)
    assert search.steps[-1].is_kept
    change = tell_next(search, measured(140))
    assert change.overrides == ("loader.prefetch_factor=4", "loader.num_workers=3")
    assert change.turned == ("loader.num_workers=3",)
    assert search.best is search.steps[2]
    assert search.next() is None
    assert search.ended_because


def test_what_looked_better_within_noise_is_tried_again_behind_what_was_kept() -> None:
    doubtful = finding("memory.features=cache", name="memory_unused")
    search = begun(measured(100, doubtful, finding("loader.num_workers=2"), half=0.03))
    tell_next(search, measured(103, half=0.03))
    tell_next(search, measured(110, doubtful, half=0.03))
    change = search.next()
    assert change is not None
    assert change.turned == ("memory.features=cache",)


def changes_to_come(search: GuidedPoints) -> Iterator[Change]:
    """All that would be tried if nothing of it ran."""
    while (change := search.next()) is not None:
        yield change
        search.ended(change, TuneTrial("failed", seconds=1.0))


def test_what_leaves_the_loader_to_the_plan_comes_first_of_all_about_it_and_takes_what_belongs_to_it_along() -> None:
    config = {"loader": {"backend": "torch", "prefetch_factor": 1, "pin_memory": False, "num_workers": 8}}
    findings = (
        finding("memory.features=cache", name="memory_unused"),
        finding("loader.persistent_workers=true", name="restarted_workers"),
        finding("loader.backend=auto", "loader.num_workers=null", name="cpu_bound_loading"),
    )
    changes = [change.turned for change in changes_to_come(begun(measured(100, *findings, config=config)))]
    assert changes[:3] == [
        ("memory.features=cache",),
        ("loader.backend=auto", "loader.num_workers=null", "loader.prefetch_factor=null", "loader.pin_memory=null"),
        ("loader.persistent_workers=true",),
    ]
    search = begun(measured(100, *findings, config=config), fixed=frozenset({"loader.pin_memory"}))
    assert "loader.pin_memory=null" not in [*changes_to_come(search)][1].turned


@pytest.mark.parametrize(
    ("figure", "half", "is_kept"),
    [(101.9, 0.001, False), (102.5, 0.001, True), (104, 0.03, False), (106, 0.03, True), (90, 0.001, False)],
)
def test_only_what_is_better_beyond_noise_is_kept(figure: float, half: float, is_kept: bool) -> None:
    search = begun(measured(100, finding("loader.num_workers=2"), half=half))
    tell_next(search, measured(figure, half=half))
    assert search.steps[-1].is_kept is is_kept
    assert search.steps[-1].gain == pytest.approx(figure / 100)


def test_what_changes_learning_precision_or_a_fixed_knob_is_advice_and_never_tried() -> None:
    search = begun(
        measured(
            100,
            finding("workload.effective_batch_size=128", learns=True, name="small_batch"),
            finding("gpu.precision=bf16-mixed", name="tensor_cores_idle"),
            finding("trainer.log_every_steps=200", name="frequent_logging"),
            finding("loader.num_workers=4", "loader.backend=auto"),
            finding("workload.eval_batch_size=8", name="device_memory_full"),
        ),
        fixed=frozenset({"loader.num_workers"}),
    )
    assert search.next() is None
    told = {" ".join(each.overrides): each for each in search.advice}
    assert told["workload.effective_batch_size=128"].changes_learning
    assert told["workload.effective_batch_size=128"].why_not == "changes what is learned"
    assert not told["gpu.precision=bf16-mixed"].changes_learning
    assert "precision" in told["gpu.precision=bf16-mixed"].why_not
    assert "loader.num_workers is fixed" in told["loader.num_workers=4 loader.backend=auto"].why_not
    assert told["workload.eval_batch_size=8"].why_not == "is about the workload"
    assert len(told) == 5


def plan_of(**values: Any) -> Any:
    return {
        knob.replace("__", "."): {"value": value, "because": "", "source": "predicted"}
        for knob, value in values.items()
    }


@pytest.mark.parametrize(
    ("fixed", "change"),
    [
        ("loader.num_workers", "loader=auto"),
        ("loader.num_workers", "loader.backend=inline"),
        ("loader", "loader=auto"),
        ("memory.micro_batch", "memory.accumulate=4"),
        ("memory.accumulate", "memory.micro_batch=64"),
    ],
)
def test_a_fixed_knob_is_not_changed_by_way_of_another(fixed: str, change: str) -> None:
    search = begun(measured(100, finding(change)), fixed=frozenset({fixed}))
    assert search.next() is None
    (advice,) = search.advice
    assert advice.why_not.startswith(f"{fixed} is fixed" if "." in fixed else "loader.backend and loader.num_workers")
    freely = begun(measured(100, finding(change), config={"loader": {"backend": "torch"}})).next()
    assert freely is not None


def test_a_change_that_fails_is_taken_back_with_its_reason() -> None:
    search = begun(measured(100, finding("memory.micro_batch=64"), finding("loader.num_workers=2")))
    tell_next(search, TuneTrial("oom", seconds=3.0, error="CUDA out of memory"))
    assert not search.steps[-1].is_kept
    assert search.steps[-1].why == "oom: CUDA out of memory"
    assert tell_next(search, measured(150)).overrides == ("loader.num_workers=2",)


def test_a_start_that_does_not_run_ends_the_search_with_its_reason() -> None:
    search = begun(TuneTrial("failed", error="no such file"))
    assert search.best is None
    assert search.next() is None
    assert search.ended_because == "the start could not be measured: failed: no such file"


def test_no_trial_is_begun_that_would_end_after_the_budget() -> None:
    found = [finding(f"loader.num_workers={number}") for number in range(2, 9)]
    search = begun(measured(100, *found), budget=TuneBudget(20, 3.5))
    for _ in range(2):
        tell_next(search, measured(100))
    assert search.next() is None
    assert "3.5 s" in str(search.ended_because)
    search = begun(measured(100, *found), budget=TuneBudget(2, 1e9))
    tell_next(search, measured(100))
    assert search.next() is None
    assert "2 trials" in str(search.ended_because)


def test_what_the_overrides_show_to_be_the_same_plan_is_not_measured_again() -> None:
    plan: Callable[[int], Any] = lambda count: {  # noqa: E731
        "loader.backend": {"value": "threads", "because": "", "source": "predicted"},
        "loader.num_workers": {"value": count, "because": "", "source": "predicted"},
    }
    search = begun(measured(100, finding("loader.num_workers=2"), plan=plan(2)))
    assert search.next() is None or "loader.num_workers=2" not in str(search.next())
    assert search.measured_alike({"loader.backend": "threads", "loader.num_workers": 2}) is search.steps[0]
    assert search.measured_alike({"loader.backend": "threads", "loader.num_workers": 3}) is None


def test_what_looked_better_most_is_gone_on_with_when_nothing_is_left_to_try() -> None:
    search = begun(measured(100, finding("loader.num_workers=2"), finding("loader.num_workers=3"), half=0.5))
    tell_next(search, measured(130, finding("gpu.compile=default"), half=0.5))
    tell_next(search, measured(120, half=0.5))
    assert search.best is search.start
    change = tell_next(search, measured(400, half=0.5))
    assert change.overrides == ("loader.num_workers=2", "gpu.compile=default")
    assert [step.is_kept for step in search.steps] == [True, True, False, True]
    assert "within noise" in search.steps[1].why
    assert search.next() is None
    assert search.best is search.steps[3]


# -- noise between runs -----------------------------------------------------------------------------------------------


def searched_in_noise(seed: int, noise: float, gains: Callable[[Change], float]) -> GuidedPoints:
    """A search in which runs of one configuration differ by this noise, which no interval of a run knows of."""
    made, dice = MadeMachine.draw(seed), random.Random(seed)
    start = [*made.starts()][seed % 5]

    def run(change: Change, number: int = 0) -> TuneTrial:
        trial = made.run(with_overrides(start, change.overrides))
        if trial.figure is None:
            return trial
        figure = 1000 * gains(change) * math.exp(dice.gauss(0, noise))
        return replace(trial, figure=figure, ci95=(0.995 * figure, 1.005 * figure))

    search = GuidedPoints(ROOM, TuneMachine(made.cores, made.has_card), again=run)
    while (change := search.next()) is not None:
        search.ended(change, run(change))
    return search


def claims(search: GuidedPoints) -> list[Any]:
    """Steps that are kept as better, not as what is gone on with within noise."""
    return [step for step in search.steps if step.is_kept and step.before and "within noise" not in step.why]


@pytest.mark.parametrize("noise", [0.03, slow(0.10)])
def test_noise_between_runs_is_seldom_kept_as_a_gain(noise: float) -> None:
    searches = [searched_in_noise(seed, noise, lambda change: 1.0) for seed in range(60)]
    assert sum(bool(claims(search)) for search in searches) < 0.1 * len(searches)
    assert all(sum(len(step.figures) for step in search.steps) <= ROOM.max_trials for search in searches)


def test_a_real_gain_is_found_in_that_noise_and_mostly_claimed() -> None:
    found = claimed = tried = 0
    for seed in range(30):
        first: list[frozenset[str]] = []

        def gains(change: Change, first: list[frozenset[str]] = first) -> float:
            first += [frozenset(change.turned)] if change.turned and not first else []
            return 1.15 if first and first[0] <= {*change.overrides} else 1.0

        search = searched_in_noise(seed, 0.03, gains)
        if first and search.best is not None:
            tried += 1
            found += first[0] <= {*search.best.change.overrides}
            claimed += any(first[0] <= {*step.change.overrides} for step in claims(search))
    assert tried >= 20
    assert found >= 0.9 * tried
    assert claimed >= 0.4 * tried
