"""Optuna's study, the real one: what it asks for lies in the space, and nothing that was told is lost."""

import math
from typing import Any

import pytest

pytest.importorskip("optuna")

from wellfed.study.points.optuna_study import OptunaStudy
from wellfed.study.points.space import Choices, Numbers, Space

SPACE: Space = {
    "lr": Numbers(1e-4, 1e-1, is_log=True),
    "width": Numbers(1, 9, step=2),
    "dim": Choices(("32", "64")),
}


def study(space: Space = SPACE, **more: Any) -> OptunaStudy:
    options = {"mode": "max", "sampler": "tpe"}
    return OptunaStudy(space, **{**options, "pruner": "none", "seed": 1, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_what_is_asked_lies_in_the_space(sampler):
    asked_for = study(sampler=sampler)
    seen = []
    for number in range(25):
        asked, values = asked_for.ask()
        assert asked == number
        assert 1e-4 <= float(values["lr"]) <= 1e-1
        assert values["width"] in ("1", "3", "5", "7", "9")
        assert values["dim"] in ("32", "64")
        seen.append(math.log10(float(values["lr"])))
        asked_for.end(asked, "complete", -abs(seen[-1] + 2))
    assert min(seen) < -3 < max(seen)  # by powers: evenly it would be one in ninety
    if sampler == "tpe":
        assert sum(abs(power + 2) for power in seen[15:]) < sum(abs(power + 2) for power in seen[:10])


@pytest.mark.parametrize(("mode", "best"), [("max", 0.8), ("min", 0.2)])
def test_it_nears_what_the_mode_calls_best(mode, best):
    space = {"x": Numbers(0.2, 0.8)}
    asked_for, tried = study(space, mode=mode), []
    for _ in range(35):
        asked, values = asked_for.ask()
        tried.append(float(values["x"]))
        asked_for.end(asked, "complete", tried[-1])
    assert abs(sum(tried[15:]) / 20 - best) < 0.2  # drawn evenly it would be 0.3


def values_of(asked_for: OptunaStudy, number: int) -> list[dict[str, str]]:
    found = []
    for _ in range(number):
        asked, values = asked_for.ask()
        asked_for.end(asked, "complete", 0.0)
        found.append(values)
    return found


def test_values_can_be_asked_for_and_come_in_turn():
    first, second = ({"lr": lr, "width": "7", "dim": "64"} for lr in ("0.0123", "0.0456"))
    asked_for = study()
    asked_for.ask_later(first)
    asked_for.ask_later(second)
    assert [asked_for.ask()[1], asked_for.ask()[1]] == [first, second]


def curve_of(asked_for: OptunaStudy, top: float, epochs: int = 9) -> int:
    """Validations until a trial with this curve is ended."""
    asked, _ = asked_for.ask()
    for epoch in range(1, epochs + 1):
        value = top * epoch
        if asked_for.report(asked, epoch, value):
            asked_for.end(asked, "pruned")
            return epoch
    asked_for.end(asked, "complete", value)
    return epochs


@pytest.mark.parametrize(("mode", "sign"), [("max", 1), ("min", -1)])
def test_median_ends_what_falls_behind_from_the_second_validation_on(mode, sign):
    asked_for = study(mode=mode, pruner="median")
    assert [curve_of(asked_for, sign * top) for top in (1, 2, 3, 4, 5)] == [9] * 5
    assert curve_of(asked_for, sign * 1.5) == 2
    assert curve_of(asked_for, sign * 6) == 9


def test_no_pruner_ends_nothing_and_nan_is_no_figure():
    asked_for = study()
    assert [curve_of(asked_for, top) for top in (5, 4, 3, 2, 1, 0, -1, -2)] == [9] * 8
    asked_for = study(pruner="median")
    asked, _ = asked_for.ask()
    assert not asked_for.report(asked, 2, math.nan)
    asked_for.end(asked, "failed")


def test_trials_of_an_earlier_command_count_for_sampler_and_pruner():
    again = study({"x": Numbers(0.2, 0.8)}, pruner="median")
    for number in range(30):
        x = 0.2 + 0.02 * number
        again.add({"x": str(x)}, "complete", x, [x, x])
    again.add({"x": "0.2"}, "pruned", 0.2, [0.2])
    again.add({"x": "0.3"}, "failed", None, [])
    asked = [again.ask() for _ in range(10)]
    assert sum(float(values["x"]) for _, values in asked) / 10 > 0.55  # drawn evenly it would be 0.5
    assert again.report(asked[0][0], 2, 0.1)
    assert not again.report(asked[1][0], 2, 0.9)
