"""What a tune keeps of its rows: rounds in turn, whatever cut them short, and what is measured anew."""

import shutil
from pathlib import Path
from typing import Any

from tests.kit.made_rows import write_rows
from tests.kit.played_trials import PlayedTrials, row_of
from wellfed.study.objective import SAMPLES_PER_S
from wellfed.study.rows import Kept, Row
from wellfed.study.study import Trials
from wellfed.study.trial_end import Trial
from wellfed.study.tune.trial import Change
from wellfed.study.tune.tuning import TuneScreen
from wellfed.study.tune.turns import TuneTrials

COMPOSED: Any = None
"""Configuration of trials that are only played."""
START, OTHER = "seed=2", "loader=auto"


def asked(*turned: str) -> Change:
    return Change(turned, "", turned)


def kept(folder: Path, retry: tuple[str, ...] = ()) -> Kept:
    return Kept(folder, SAMPLES_PER_S, "abc", retry)


def test_what_is_no_comparison_is_put_aside_and_nothing_is_lost(tmp_path: Path) -> None:
    for number in (1, 2):
        write_rows(tmp_path, [Row("a", "trial", (), "ok", number, exit_code=0, code="abc")])
        rows = kept(tmp_path)
        aside = rows.set_aside()
        assert not rows.found.rows
        assert f'"attempt": {number}' in (aside / "a" / "run.json").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"before1", "before2"}


class Machine:
    """Trials end as they are told to, one after the other."""

    def __init__(self, folder: Path, retry: tuple[str, ...] = ()) -> None:
        self.ends: dict[str, list[str]] = {}
        """Ends of a configuration's trials, in order; ``ok`` beyond them."""
        self.played = PlayedTrials(folder, self._play)
        trials = Trials(kept(folder, retry), TuneScreen(SAMPLES_PER_S), lambda overrides, own: COMPOSED)
        self.trials = TuneTrials((START,), trials, self.played)

    def _play(self, trial: Trial) -> Row:
        ends = self.ends.get(trial.point.overrides[-1], [])
        status = ends.pop(0) if ends else "ok"
        return row_of(trial, status=status, samples_per_s=1.0, exit_code={"ok": 0, "killed": -9}.get(status, 1))

    @property
    def ran(self) -> list[tuple[str, str]]:
        return [(trial.kind, trial.point.overrides[-1]) for trial in self.played.ran]


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.ends = {OTHER: ["oom"]}
    trials = machine.trials
    first = [trials.measure(change).row.status for change in (asked(), asked(OTHER))]
    assert first == [trials.measure(change).row.status for change in (asked(), asked(OTHER))] == ["ok", "oom"]
    assert machine.ran == [("trial", START), ("trial", OTHER)]
    again = Machine(tmp_path, retry=("oom",))
    assert again.trials.measure(asked(OTHER)).row.status == "ok"


def test_repeats_are_measured_once_and_those_to_retry_anew(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.ends = {OTHER: ["ok", "ok", "killed"]}
    assert machine.trials.measure(asked(OTHER)).row.status == "ok"

    def again(trials: TuneTrials, *numbers: int) -> list[tuple[int, str]]:
        rows = [trials.measure_again(asked(OTHER), number).row for number in numbers]
        return [(row.attempt, row.status) for row in rows]

    assert again(machine.trials, 1, 2) == again(Machine(tmp_path).trials, 1, 2) == [(1, "ok"), (2, "killed")]
    assert again(Machine(tmp_path, retry=("killed",)).trials, 1, 2) == [(1, "ok"), (2, "ok")]
    anew = Machine(tmp_path, retry=("ok",))
    assert anew.trials.measure(asked(OTHER)).row.attempt == 2
    anew.played.ran.clear()
    assert again(anew.trials, 1, 1) == [(1, "ok"), (1, "ok")]  # the trial before it is another
    assert anew.ran == [("repeat", OTHER)]


def test_start_and_result_run_in_turn_and_go_on_where_they_were(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for change in (asked(), asked(OTHER)):
        machine.trials.measure(change)
    machine.played.ran.clear()
    rounds = [machine.trials.round_of((OTHER,), number) for number in (1, 2)]
    again = Machine(tmp_path)
    rounds += [again.trials.round_of((OTHER,), number) for number in (1, 2, 3)][2:]
    assert [word for _, word in machine.ran + again.ran] == [START, OTHER, OTHER, START, START, OTHER]
    assert [kind for kind, _ in machine.ran] == ["before", "after", "after", "before"]
    assert [(first.overrides[-1], second.overrides[-1]) for first, second in rounds] == [(START, OTHER)] * 3


def test_of_a_round_that_a_kill_has_cut_the_rest_is_measured(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for change in (asked(), asked(OTHER)):
        machine.trials.measure(change)
    machine.trials.round_of((OTHER,), 1)
    point = machine.trials.point((OTHER,)).id
    shutil.rmtree(tmp_path / f"{point}.after1")
    again = Machine(tmp_path)
    again.trials.round_of((OTHER,), 1)
    assert again.ran == [("after", OTHER)]


def test_another_result_is_not_compared_with_rows_of_the_start_from_before(tmp_path: Path) -> None:
    machine, third = Machine(tmp_path), "gpu=8gb"
    for change in (asked(), asked(OTHER), asked(third)):
        machine.trials.measure(change)
    machine.trials.round_of((OTHER,), 1)
    again = Machine(tmp_path)
    again.trials.round_of((third,), 1)
    assert [word for _, word in again.ran] == [START, third]
