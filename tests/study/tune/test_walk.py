"""The walk against machines whose costs are made up, and what it must never do."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.made_machine import GRID, MadeMachine
from wellfed.record.entries import FindingEntry, RunRecord
from wellfed.study.rows import Row
from wellfed.study.tune.moves import TuneMachine
from wellfed.study.tune.trial import Change, TuneTrial, knob_of, with_overrides
from wellfed.study.tune.walk import Step, Walk


def walked(made: MadeMachine, start: Sequence[str], trials: int = 20, seconds: float = 3600.0) -> Walk:
    """A walk on a machine without noise between runs, where measuring again costs nothing."""

    def run(change: Change, number: int = 0) -> TuneTrial:
        trial = made.run(with_overrides(start, change.overrides))
        return replace(trial, row=replace(trial.row, seconds=0.0)) if number else trial

    walk = Walk(trials, seconds, TuneMachine(made.cores, made.has_card))
    while (change := walk.next()) is not None:
        walk.judge(change, run(change), run)
    return walk


def is_as_good_and_short(seed: int, start: int) -> bool:
    """Whether it finds 95 % of the rate of the grid's best point in 30 % of the grid's time."""
    made = MadeMachine.draw(seed)
    words = [*made.starts()][start]
    walk = walked(made, words, trials=60)
    grid = {point: found for point in GRID if (found := made.rate(point)) is not None}
    best = max(grid, key=lambda point: made.noisy(point, grid[point][0]))
    found = made.rate(with_overrides(words, walk.best.change.overrides))
    assert found is not None
    is_good = found[0] >= 0.95 * grid[best][0]
    return is_good and walk.spent_seconds <= 0.3 * sum(seconds for _, seconds in grid.values())


def test_it_finds_nearly_what_the_grid_finds_in_a_fraction_of_its_time() -> None:
    good = [is_as_good_and_short(seed, seed % 5) for seed in range(8)]
    assert sum(good) >= 7


@pytest.mark.slow
def test_it_does_so_on_hundreds_of_machines() -> None:
    good = [is_as_good_and_short(seed, start) for seed in range(1000, 1060) for start in range(5)]
    assert sum(good) >= 0.95 * len(good)


@given(st.integers(0, 10**6), st.integers(0, 4), st.integers(1, 8), st.floats(1, 300))
@settings(max_examples=15)
def test_it_ends_within_its_budget_and_tries_nothing_twice(
    seed: int, start: int, max_trials: int, max_seconds: float
) -> None:
    made = MadeMachine.draw(seed)
    walk = walked(made, [*made.starts()][start], max_trials, max_seconds)
    assert walk.ended_because
    assert 1 <= sum(len(step.runs) for step in walk.steps) <= max_trials
    # Each trial was begun while there was time for the usual one.
    assert sum(step.trial.row.seconds for step in walk.steps[:-1]) <= max_seconds or len(walk.steps) == 1
    tried = [frozenset(step.change.overrides) for step in walk.steps]
    assert len(set(tried)) == len(tried)
    assert {knob_of(word).partition(".")[0] for words in tried for word in words} <= {"loader", "memory", "gpu"}
    assert all((step.gain or 0.0) >= 1.02 for step in walk.steps[1:] if step.is_kept)


def finding(*change: str, learns: bool = False, name: str = "too_few_workers") -> FindingEntry:
    found = {"id": name, "severity": "high", "message": f"says {name}", "advice": "", "evidence": {}, "gain": None}
    return {**found, "text": "", "change": list(change), "changes_learning": learns}  # type: ignore[return-value]


def measured(figure: float, *findings: FindingEntry, half: float = 0.01, **known: Any) -> TuneTrial:
    ci95 = (figure * (1 - half), figure * (1 + half))
    row = Row("p", "trial", (), "ok", 1, samples_per_s=figure, ci95=ci95, seconds=1.0)
    return TuneTrial(row, RunRecord("run", findings=list(findings), **known))


def failed(status: Any = "failed", message: str = "went wrong") -> TuneTrial:
    error = {"kind": "code", "message": message, "advice": ""}
    return TuneTrial(Row("p", "trial", (), status, 1, seconds=1.0, error=error), RunRecord("run"))


class Walking:
    """A walk whose trials a test plays; a repeat gives the same figure."""

    def __init__(self, start: TuneTrial, trials: int = 40, seconds: float = 3600.0) -> None:
        self.walk = Walk(trials, seconds, TuneMachine(2, on_gpu=False))
        self._last: dict[tuple[str, ...], TuneTrial] = {}
        assert self.tell_next(start) == Change((), "the start")

    def tell_next(self, trial: TuneTrial) -> Change:
        change = self.walk.next()
        assert change is not None
        self._last[change.overrides] = trial
        self.walk.judge(change, trial, lambda asked, number: self._last[asked.overrides])
        return change

    @property
    def last(self) -> Step:
        return self.walk.steps[-1]

    def to_come(self) -> Iterator[Change]:
        """All that would be tried if nothing of it ran."""
        while self.walk.next() is not None:
            yield self.tell_next(failed())


def test_findings_lead_in_their_order_and_those_of_what_was_kept_come_next() -> None:
    walking = Walking(
        measured(100, finding("loader.num_workers=2"), finding("loader.prefetch_factor=4", name="uneven"))
    )
    assert walking.tell_next(measured(101)).overrides == ("loader.num_workers=2",)
    assert walking.last.why == "no better"
    kept = measured(150, finding("loader.num_workers=2"), finding("loader.num_workers=3"))
    assert walking.tell_next(kept).overrides == ("loader.prefetch_factor=4",)
    assert walking.last.is_kept
    change = walking.tell_next(measured(140))
    assert change.overrides == ("loader.prefetch_factor=4", "loader.num_workers=3")
    assert change.turned == ("loader.num_workers=3",)
    assert walking.walk.best is walking.walk.steps[2]


def test_what_leaves_the_loader_to_the_plan_comes_first_of_all_about_it_and_takes_what_belongs_to_it_along() -> None:
    config = {"loader": {"backend": "torch", "prefetch_factor": 1, "pin_memory": False, "num_workers": 8}}
    findings = (
        finding("memory.features=cache", name="memory_unused"),
        finding("loader.persistent_workers=true", name="restarted_workers"),
        finding("loader.backend=auto", "loader.num_workers=null", name="cpu_bound_loading"),
    )
    changes = [change.turned for change in Walking(measured(100, *findings, config=config)).to_come()]
    assert changes[:3] == [
        ("memory.features=cache",),
        ("loader.backend=auto", "loader.num_workers=null", "loader.prefetch_factor=null", "loader.pin_memory=null"),
        ("loader.persistent_workers=true",),
    ]


@pytest.mark.parametrize(
    ("figure", "half", "is_kept"),
    [(101.9, 0.001, False), (102.5, 0.001, True), (104, 0.03, False), (106, 0.03, True), (90, 0.001, False)],
)
def test_only_what_is_better_beyond_noise_is_kept(figure: float, half: float, is_kept: bool) -> None:
    walking = Walking(measured(100, finding("loader.num_workers=2"), half=half))
    walking.tell_next(measured(figure, half=half))
    assert walking.last.is_kept is is_kept
    assert walking.last.gain == pytest.approx(figure / 100)


def test_what_looked_better_most_is_gone_on_with_when_nothing_is_left_to_try() -> None:
    walking = Walking(measured(100, finding("loader.num_workers=2"), finding("memory.features=cache"), half=0.5))
    walking.tell_next(measured(120, half=0.5))
    walking.tell_next(measured(130, finding("loader.num_workers=2"), half=0.5))
    assert walking.walk.best is walking.walk.steps[0]
    change = walking.tell_next(measured(400, half=0.5))
    assert change.overrides == ("memory.features=cache", "loader.num_workers=2")
    assert [step.is_kept for step in walking.walk.steps] == [True, False, True, True]
    assert "within noise" in walking.walk.steps[2].why


def test_what_changes_learning_or_precision_is_advice_and_never_tried() -> None:
    walking = Walking(
        measured(
            100,
            finding("workload.effective_batch_size=128", learns=True, name="small_batch"),
            finding("gpu.precision=bf16-mixed", name="tensor_cores_idle"),
            finding("trainer.log_every_steps=200", name="frequent_logging"),
            finding("workload.eval_batch_size=8", name="device_memory_full"),
        ),
    )
    assert walking.walk.next() is None
    assert {each["overrides"][0].partition("=")[0]: each["why_not"] for each in walking.walk.advice} == {
        "workload.effective_batch_size": "changes what is learned",
        "gpu.precision": "changes the precision of all numbers",
        "trainer.log_every_steps": "no knob of the loader, the memory or the GPU",
        "workload.eval_batch_size": "is about the workload",
    }


def test_a_change_that_fails_is_taken_back_with_its_reason() -> None:
    walking = Walking(measured(100, finding("memory.micro_batch=64"), finding("loader.num_workers=2")))
    walking.tell_next(failed("oom", "CUDA out of\nmemory"))
    assert (walking.last.is_kept, walking.last.why) == (False, "oom: CUDA out of memory")
    assert walking.tell_next(measured(150)).overrides == ("loader.num_workers=2",)


def test_a_start_that_does_not_run_ends_the_walk_with_its_reason() -> None:
    walk = Walking(failed(message="no such file")).walk
    assert (walk.best, walk.next()) == (None, None)
    assert walk.ended_because == "the start could not be measured: failed: no such file"


def test_no_trial_is_begun_that_would_end_after_the_budget() -> None:
    found = [finding(f"loader.num_workers={number}") for number in range(2, 9)]
    for budget, told in (({"seconds": 3.5}, "3.5 s"), ({"trials": 3}, "3 trials")):
        walking = Walking(measured(100, *found), **budget)  # type: ignore[arg-type]
        for _ in range(2):
            walking.tell_next(measured(100))
        assert walking.walk.next() is None
        assert told in str(walking.walk.ended_because)


# -- noise between runs -----------------------------------------------------------------------------------------------


def walked_in_noise(seed: int, noise: float, gains: Callable[[Change], float]) -> Walk:
    """A walk in which runs of one configuration differ by this noise, which no interval of a run knows of."""
    made, dice = MadeMachine.draw(seed), random.Random(seed)
    start = [*made.starts()][seed % 5]

    def run(change: Change, number: int = 0) -> TuneTrial:
        trial = made.run(with_overrides(start, change.overrides))
        if trial.figure is None:
            return trial
        figure = 1000 * gains(change) * math.exp(dice.gauss(0, noise))
        return replace(trial, row=replace(trial.row, samples_per_s=figure, ci95=(0.995 * figure, 1.005 * figure)))

    walk = Walk(20, 3600.0, TuneMachine(made.cores, made.has_card))
    while (change := walk.next()) is not None:
        walk.judge(change, run(change), run)
    return walk


def claims(walk: Walk) -> list[Step]:
    """Steps that are kept as better, not as what is gone on with within noise."""
    return [step for step in walk.steps[1:] if step.is_kept and "within noise" not in step.why]


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.03, 0.10])
def test_noise_between_runs_is_seldom_kept_as_a_gain(noise: float) -> None:
    walks = [walked_in_noise(seed, noise, lambda change: 1.0) for seed in range(60)]
    assert sum(bool(claims(walk)) for walk in walks) < 0.1 * len(walks)


@pytest.mark.slow
def test_a_real_gain_is_found_in_that_noise_and_mostly_kept() -> None:
    found = kept = tried = 0
    for seed in range(20):
        first: list[frozenset[str]] = []

        def gains(change: Change, first: list[frozenset[str]] = first) -> float:
            first += [frozenset(change.turned)] if change.turned and not first else []
            return 1.15 if first and first[0] <= {*change.overrides} else 1.0

        walk = walked_in_noise(seed, 0.03, gains)
        if first and walk.best is not None:
            tried += 1
            found += first[0] <= {*walk.best.change.overrides}
            kept += any(first[0] <= {*step.change.overrides} for step in claims(walk))
    assert tried >= 13
    assert found >= 0.9 * tried
    assert kept >= 0.4 * tried
