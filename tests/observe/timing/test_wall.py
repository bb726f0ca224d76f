"""Each moment of training goes to one account, and all accounts add up."""

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wellfed.observe.timing.step_clock import StepClock
from wellfed.observe.timing.wall import (
    CHECKPOINT,
    END,
    EPOCH_END,
    LOGGING,
    STEPS,
    VALIDATION,
    Wall,
    waited_for_a_core_s,
)

PARTS = ("start_s", "steps_s", "validation_s", "checkpoint_s", "epoch_end_s", "logging_s", "end_s", "other_s")


class Clock:
    """A time that only `pass_s` moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds

    def __call__(self) -> float:
        return self.now_s


def test_what_runs_within_something_else_is_taken_from_it() -> None:
    clock = Clock()
    wall = Wall(clock)
    clock.pass_s(50)  # nobody trains
    with wall.running():
        clock.pass_s(1)
        StepClock(wall=wall).ask()
        clock.pass_s(10)
        with wall.during(VALIDATION):
            clock.pass_s(4)
            before = wall.switch("Own.on_validation_end")
            clock.pass_s(3)
            with wall.during(CHECKPOINT):
                clock.pass_s(2)
            wall.back(before)
            clock.pass_s(1)
        clock.pass_s(5)
        wall.switch(EPOCH_END)
        clock.pass_s(0.5)
        wall.switch(END)
        clock.pass_s(0.25)
    clock.pass_s(50)
    assert wall.entry() == {
        "total_s": 26.75,
        "start_s": 1.0,
        "steps_s": 15.0,
        "validation_s": 5.0,
        "checkpoint_s": 2.0,
        "epoch_end_s": 0.5,
        "logging_s": 0.0,
        "callbacks": {"Own.on_validation_end": 3.0},
        "end_s": 0.25,
        "other_s": 0.0,
    }


def test_while_it_trains_it_is_told_until_now_and_a_failure_closes_what_was_open() -> None:
    clock = Clock()
    wall = Wall(clock)
    with suppress(LookupError), wall.running(), wall.during(VALIDATION):
        clock.pass_s(2)
        assert wall.entry()["validation_s"] == 2.0
        clock.pass_s(1)
        raise LookupError
    assert wall.entry()["validation_s"] == wall.entry()["total_s"] == 3.0


def test_a_run_that_is_resumed_adds_up_and_one_that_never_trained_has_none() -> None:
    clock = Clock()
    earlier = Wall(clock)
    assert earlier.entry() is None
    assert earlier.switch(STEPS) is None
    with earlier.running():
        earlier.switch("Own.on_fit_start")
        clock.pass_s(2)
    wall = Wall(clock)
    assert wall.entry(earlier.entry()) == earlier.entry()
    for _ in range(2):
        with wall.running():
            wall.switch("Own.on_fit_start")
            clock.pass_s(1)
            wall.switch("Other.setup")
            clock.pass_s(3)
    found = wall.entry(earlier.entry())
    assert (found["total_s"], found["callbacks"]) == (10.0, {"Other.setup": 6.0, "Own.on_fit_start": 4.0})


def test_what_a_card_still_computes_is_time_of_steps() -> None:
    clock = Clock()
    wall = Wall(clock)
    wall.wait_for_device = lambda: clock.pass_s(7)
    with wall.running():
        wall.switch(STEPS)
        clock.pass_s(1)
        with wall.during(VALIDATION):
            wall.settle()  # no step is under way: a hook of a validation's batch waits for nothing
            clock.pass_s(2)
    assert (wall.entry()["steps_s"], wall.entry()["validation_s"]) == (8.0, 2.0)


@given(st.lists(st.tuples(st.sampled_from([STEPS, VALIDATION, LOGGING, "A.setup", "B.step"]), st.floats(0, 1e3))))
def test_all_accounts_add_up_to_the_total(passed: list[tuple[str, float]]) -> None:
    clock = Clock()
    wall = Wall(clock)
    with wall.running():
        clock.pass_s(1)
        for account, seconds in passed:
            wall.switch(account)
            clock.pass_s(seconds)
    found = wall.entry()
    parts = sum(found[name] for name in PARTS) + sum(found["callbacks"].values())
    assert parts == pytest.approx(found["total_s"], abs=1e-4)
    assert found["total_s"] == pytest.approx(1 + sum(seconds for _, seconds in passed), abs=1e-4)
    assert found["other_s"] < 1e-3


def test_the_thread_that_waited_most_for_a_core_counts() -> None:
    clock, waited = Clock(), {"1": 5.0, "2": 1.0, "3": 0.0}
    wall = Wall(clock, lambda: dict(waited))
    assert wall.core_wait_frac is None
    with wall.running():
        clock.pass_s(10)
        waited.update({"1": 5.5, "2": 5.0, "4": 99.0})
    assert wall.core_wait_frac == pytest.approx(0.4)
    uncounted = Wall(clock, dict)
    with uncounted.running():
        clock.pass_s(10)
    assert uncounted.core_wait_frac is None


def test_what_the_system_counts_of_waiting_for_a_core(tmp_path: Path) -> None:
    for name, told in {"7": "20 1500000000 3", "8": "20 0 1"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "schedstat").write_text(f"{told}\n")
    (tmp_path / "9").mkdir()  # has ended
    assert waited_for_a_core_s(tmp_path) == {"7": 1.5, "8": 0.0}
    (tmp_path / "7" / "schedstat").write_text("20 0 3\n")
    assert waited_for_a_core_s(tmp_path) == {}, "a kernel that does not count"
    (tmp_path / "8" / "schedstat").write_text("no number\n")
    assert waited_for_a_core_s(tmp_path) == {}
    assert waited_for_a_core_s(tmp_path / "nowhere") == {}
