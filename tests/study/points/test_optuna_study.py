"""Optuna's study, the real one: what it asks for lies in the space, and nothing that was told is lost."""

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("optuna")

from wellfed.errors import ConfigError
from wellfed.study.points.optuna_study import JOURNAL, OptunaStudy
from wellfed.study.points.space import Choices, Numbers, Space

SPACE: Space = {
    "lr": Numbers(1e-4, 1e-1, is_log=True),
    "width": Numbers(1, 9, step=2),
    "dim": Choices(("32", "64")),
}


def study(folder: Path, space: Space = SPACE, **more: Any) -> OptunaStudy:
    options = {"mode": "max", "sampler": "tpe"}
    return OptunaStudy(folder, space, **{**options, "pruner": "none", "seed": 1, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_what_is_asked_lies_in_the_space(tmp_path, sampler):
    asked_for = study(tmp_path, sampler=sampler)
    seen = []
    for number in range(25):
        asked = asked_for.ask()
        assert asked.number == number
        values = asked.values
        assert 1e-4 <= float(values["lr"]) <= 1e-1
        assert values["width"] in ("1", "3", "5", "7", "9")
        assert values["dim"] in ("32", "64")
        seen.append(math.log10(float(values["lr"])))
        asked_for.end(asked.number, "complete", -abs(seen[-1] + 2))
    assert min(seen) < -3 < max(seen)  # by powers: evenly it would be one in ninety
    if sampler == "tpe":
        assert sum(abs(power + 2) for power in seen[15:]) < sum(abs(power + 2) for power in seen[:10])


@pytest.mark.parametrize(("mode", "best"), [("max", 0.8), ("min", 0.2)])
def test_it_nears_what_the_mode_calls_best(tmp_path, mode, best):
    space = {"x": Numbers(0.2, 0.8)}
    asked_for, tried = study(tmp_path, space, mode=mode), []
    for _ in range(35):
        asked = asked_for.ask()
        tried.append(float(asked.values["x"]))
        asked_for.end(asked.number, "complete", tried[-1])
    assert abs(sum(tried[15:]) / 20 - best) < 0.2  # drawn evenly it would be 0.3


def values_of(asked_for: OptunaStudy, number: int) -> list[dict[str, str]]:
    found = []
    for _ in range(number):
        asked = asked_for.ask()
        asked_for.end(asked.number, "complete", 0.0)
        found.append(asked.values)
    return found


def test_the_seed_decides_and_a_restart_draws_no_value_twice(tmp_path):
    for name in "abc":
        (tmp_path / name).mkdir()
    first = values_of(study(tmp_path / "a"), 4)
    assert values_of(study(tmp_path / "b"), 4) == first
    assert values_of(study(tmp_path / "c", seed=2), 4) != first
    assert not [values for values in values_of(study(tmp_path / "a"), 4) if values in first]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(st.data())
def test_a_journal_that_a_kill_has_cut_anywhere_goes_on(tmp_path, data):
    journal = tmp_path / JOURNAL
    journal.unlink(missing_ok=True)
    begun = study(tmp_path)
    done = begun.ask()
    begun.end(done.number, "complete", 0.5)
    begun.ask()
    content = journal.read_bytes()
    lines = content.splitlines(keepends=True)
    number = data.draw(st.integers(0, len(lines) - 1))
    cut = sum(map(len, lines[:number])) + data.draw(st.integers(0, len(lines[number])))
    journal.write_bytes(content[:cut])
    (tmp_path / f"{JOURNAL}.lock").touch()  # held by whom nobody knows
    again = study(tmp_path)
    for each in again.unfinished():
        again.give_up(each)
    asked = again.ask()
    assert asked.number >= (2 if number == len(lines) - 1 else 0)
    again.end(asked.number, "complete", 0.25)
    assert study(tmp_path).unfinished() == []


def test_what_was_running_is_asked_again_first_and_only_once(tmp_path):
    begun = study(tmp_path)
    lost = [begun.ask(), begun.ask()]
    again = study(tmp_path)
    assert [asked.values for asked in again.unfinished()] == [asked.values for asked in lost]
    for asked in again.unfinished():
        again.give_up(asked)
    assert study(tmp_path).unfinished() == []
    again = study(tmp_path)  # killed once more before either was asked
    found = [again.ask() for _ in range(3)]
    assert [asked.values for asked in found[:2]] == [asked.values for asked in lost]
    assert [asked.number for asked in found[:2]] == [2, 3]
    assert found[2].values not in [asked.values for asked in lost]


def test_values_can_be_asked_for_and_come_in_turn(tmp_path):
    first, second = ({"lr": lr, "width": "7", "dim": "64"} for lr in ("0.0123", "0.0456"))
    asked_for = study(tmp_path)
    asked_for.ask_later(first)
    asked_for.ask_later(second)
    assert [asked_for.ask().values, asked_for.ask().values] == [first, second]


def test_sampler_pruner_seed_and_the_order_of_axes_may_change(tmp_path):
    begun = study(tmp_path)
    begun.end(begun.ask().number, "complete", 0.5)
    turned = dict(reversed(SPACE.items()))
    assert study(tmp_path, turned, sampler="random", pruner="asha", seed=9).ask().number == 1


@pytest.mark.parametrize("content", [b"no journal\n", b'{"op_code": 0}\n', b"[1]\n"])
def test_a_file_that_is_no_journal_is_told_and_kept(tmp_path, content):
    (tmp_path / JOURNAL).write_bytes(content)
    with pytest.raises(ConfigError, match="can't be read as a journal of Optuna"):
        study(tmp_path)
    assert (tmp_path / JOURNAL).read_bytes() == content


def curve_of(asked_for: OptunaStudy, top: float, epochs: int = 9) -> int:
    """Validations until a trial with this curve is ended."""
    asked = asked_for.ask()
    for epoch in range(1, epochs + 1):
        value = top * epoch
        if asked_for.report(asked.number, epoch, value):
            asked_for.end(asked.number, "pruned")
            return epoch
    asked_for.end(asked.number, "complete", value)
    return epochs


@pytest.mark.parametrize(("mode", "sign"), [("max", 1), ("min", -1)])
def test_median_ends_what_falls_behind_from_the_second_validation_on(tmp_path, mode, sign):
    asked_for = study(tmp_path, mode=mode, pruner="median")
    assert [curve_of(asked_for, sign * top) for top in (1, 2, 3, 4, 5)] == [9] * 5
    assert curve_of(asked_for, sign * 1.5) == 2
    assert curve_of(asked_for, sign * 6) == 9


@pytest.mark.parametrize(("mode", "sign"), [("max", 1), ("min", -1)])
def test_asha_lets_a_third_go_on(tmp_path, mode, sign):
    asked_for = study(tmp_path, mode=mode, pruner="asha")
    assert curve_of(asked_for, sign * 5) == 9
    assert [curve_of(asked_for, sign * top) for top in (1, 2, 3)] == [1, 1, 1]
    assert curve_of(asked_for, sign * 6) == 9


def test_no_pruner_ends_nothing_and_nan_is_no_figure(tmp_path):
    asked_for = study(tmp_path)
    assert [curve_of(asked_for, top) for top in (5, 4, 3, 2, 1, 0, -1, -2)] == [9] * 8
    asked_for = study(tmp_path, pruner="median")
    asked = asked_for.ask()
    assert not asked_for.report(asked.number, 2, math.nan)
    asked_for.end(asked.number, "failed")
    assert asked_for.unfinished() == []
