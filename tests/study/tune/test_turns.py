"""What a tune keeps of its rows: rounds in turn, whatever cut them short, and what is measured anew."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.kit.played_trials import PlayedTrials
from wellfed.study.executors.executor import Trial
from wellfed.study.ledger import Ledger, append
from wellfed.study.objective import SAMPLES_PER_S
from wellfed.study.row import Row
from wellfed.study.study import Trials
from wellfed.study.tune.trial import Change
from wellfed.study.tune.tuning import TuneScreen
from wellfed.study.tune.turns import TuneTrials

CODE = "abc"
COMPOSED: Any = None
"""Configuration of trials that are only played."""
SCREEN = TuneScreen(SAMPLES_PER_S)


def row(point: str, kind: str = "confirm", **more: object) -> Row:
    made = Row(point, kind, (), "ok", 1, samples_per_s=1.0, device="CPU", code=CODE)  # type: ignore[arg-type]
    return replace(made, **more)  # type: ignore[arg-type]


def asked(*turned: str) -> Change:
    return Change(turned, "", turned)


def kept(folder: Path, *rows: Row, retry: tuple[str, ...] = ()) -> Ledger:
    append(folder, rows)
    return Ledger(folder, SAMPLES_PER_S, CODE, retry)


def test_what_is_no_comparison_is_put_aside_and_nothing_is_lost(tmp_path: Path) -> None:
    for number in (1, 2):
        ledger = kept(tmp_path, row("a", "trial", attempt=number))
        aside = ledger.set_aside()
        assert not ledger.found.rows
        assert f'"attempt": {number}' in aside.read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"ledger.jsonl.before1", "ledger.jsonl.before2"}


def tuned(
    folder: Path, played: PlayedTrials, retry: tuple[str, ...] = (), words: tuple[str, ...] = ("seed=2",)
) -> TuneTrials:
    trials = Trials(kept(folder, retry=retry), SCREEN, lambda overrides, own: COMPOSED)
    return TuneTrials(words, trials, played)


class Machine:
    """Trials end as they are told to, one after the other."""

    def __init__(self, folder: Path, retry: tuple[str, ...] = ()) -> None:
        self.ends: dict[str, list[str]] = {}
        """Ends of a configuration's trials, in order; ``ok`` beyond them."""
        self.played = PlayedTrials(self._play)
        self.trials = tuned(folder, self.played, retry)

    def _play(self, trial: Trial) -> Row:
        ends = self.ends.get(trial.overrides[-1], [])
        return replace(trial.row, status=ends.pop(0) if ends else "ok", device="CPU", samples_per_s=1.0)  # type: ignore[arg-type]

    @property
    def ran(self) -> list[tuple[str, str]]:
        return [(row.kind, row.overrides[-1]) for row in self.played.ran]


START, OTHER = "seed=2", "loader=auto"


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.ends = {OTHER: ["oom"]}
    trials = machine.trials
    first = [trials.measure(change).row.status for change in (asked(), asked(OTHER))]
    assert first == [trials.measure(change).row.status for change in (asked(), asked(OTHER))] == ["ok", "oom"]
    assert machine.ran == [("trial", START), ("trial", OTHER)]
    again = Machine(tmp_path, retry=("oom",))
    assert again.trials.measure(asked(OTHER)).row.status == "ok"


def test_repeats_of_an_earlier_trial_and_those_to_retry_are_measured_anew(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.ends = {OTHER: ["ok", "ok", "killed"]}
    assert machine.trials.measure(asked(OTHER)).row.status == "ok"

    def again(trials: TuneTrials, *numbers: int) -> list[tuple[int, str]]:
        rows = [trials.measure_again(asked(OTHER), number).row for number in numbers]
        return [(row.attempt, row.status) for row in rows]

    assert again(machine.trials, 1, 2) == again(Machine(tmp_path).trials, 1, 2) == [(1, "ok"), (2, "killed")]
    assert again(Machine(tmp_path, retry=("killed",)).trials, 1, 2) == [(1, "ok"), (3, "ok")]
    anew = Machine(tmp_path, retry=("ok",))
    anew.ends = {OTHER: ["ok", "ok", "failed"]}
    assert anew.trials.measure(asked(OTHER)).row.attempt == 2
    assert again(anew.trials, 1, 2, 1) == [(4, "ok"), (5, "failed"), (4, "ok")]


def test_start_and_result_run_in_turn_and_go_on_where_they_were(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    trials = machine.trials
    for change in (asked(), asked(OTHER)):
        trials.measure(change)
    machine.played.ran.clear()
    assert len(trials.compare((OTHER,), 2)) == 2
    assert trials.rounds_missing((OTHER,), 3) == 1
    rounds = trials.compare((OTHER,), 3)
    assert [word for _, word in machine.ran] == [START, OTHER, OTHER, START, START, OTHER]
    assert {kind for kind, _ in machine.ran} == {"confirm"}
    assert [(first.overrides[-1], second.overrides[-1]) for first, second in rounds] == [(START, OTHER)] * 3


def test_a_result_that_fails_ends_the_comparison_for_good(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.ends = {OTHER: ["ok", "ok", "oom"]}
    trials = machine.trials
    for change in (asked(), asked(OTHER)):
        trials.measure(change)
    for _ in range(2):  # the same command again
        rounds = trials.compare((OTHER,), 5)
        assert [second.status for _, second in rounds] == ["ok", "oom"]
        assert trials.rounds_missing((OTHER,), 5) == 0
    assert len(machine.ran) == 2 + 4


def test_a_round_that_a_kill_has_cut_is_measured_anew(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for change in (asked(), asked(OTHER)):
        machine.trials.measure(change)
    start = machine.trials.point(())
    machine.trials.ledger.append(replace(machine.trials.ledger.begin(start, "confirm"), status="ok"))
    assert [first.attempt for first, _ in machine.trials.compare((OTHER,), 2)] == [2, 3]
    assert [word for _, word in machine.ran[2:]] == [START, OTHER, OTHER, START]


def test_another_result_is_not_compared_with_rows_of_the_start_from_before(tmp_path: Path) -> None:
    machine, third = Machine(tmp_path), "gpu=8gb"
    for change in (asked(), asked(OTHER), asked(third)):
        machine.trials.measure(change)
    machine.trials.compare((OTHER,), 2)
    again = Machine(tmp_path)
    assert [first.attempt for first, _ in again.trials.compare((third,), 2)] == [3, 4]
    assert [word for _, word in again.ran] == [START, third, third, START]
    assert again.trials.rounds_missing((OTHER,), 2) == 0
