"""What a sweep keeps of its rows: what is missing, what is best by its objective, what is measured again."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.kit import made
from wellfed.errors import ConfigError
from wellfed.study.ledger import Ledger, append, read
from wellfed.study.row import Row
from wellfed.study.study import Trials
from wellfed.study.study_screen import StudyScreen

ANY: Any = None
AXES = {"loader": ("baseline", "conservative", "balanced", "aggressive")}
POINTS = SLOW, THRIFTY, FAST, FASTEST = made.sweep_file(AXES).points
IDS = [point.id for point in POINTS]
ROWS = [
    made.row(point, rate, energy_per_sample_j=joules, peak_memory_gib=peak)
    for point, rate, joules, peak in zip(
        POINTS, (100.0, 200.0, 300.0, 400.0), (0.04, 0.01, 0.03, None), (1.0, 2.0, 3.0, 4.0), strict=True
    )
]


def kept(
    folder: Path, rows: Sequence[Row] = ROWS, objective: str = "samples_per_s", retry: Sequence[str] = ()
) -> Ledger:
    file = made.sweep_file(AXES, objective=objective)
    folder.mkdir(exist_ok=True)
    append(folder, rows)
    return Ledger(folder, file.ranked_by, file.code, retry, file.ids)


def shown(ledger: Ledger) -> Trials:
    """The same rows, and a terminal that shows what is added."""
    return Trials(ledger, StudyScreen(ledger.objective, [*AXES], "triplets"), ANY)


@pytest.mark.parametrize(
    ("objective", "best"),
    [
        ("samples_per_s", [FASTEST, FAST, THRIFTY]),
        ("samples_per_joule", [THRIFTY, FAST, SLOW]),
        ("peak_memory", [SLOW, THRIFTY, FAST]),
    ],
)
def test_the_three_best_by_the_objective_are_measured_again_in_turn(
    tmp_path: Path, objective: str, best: list[made.GridPoint]
) -> None:
    ledger = kept(tmp_path, objective=objective)
    first, second, third = (point.id for point in best)
    turn = [first, second, third]
    assert ledger.best() == ROWS[IDS.index(first)]
    assert ledger.to_confirm(IDS) == [*turn, *turn[::-1], *turn]
    assert ledger.to_confirm([second, third]) == [second, third, third, second, second, third]
    assert ledger.to_confirm([third]) == []


def test_what_can_not_confirm_is_not_measured_over_and_over(tmp_path: Path) -> None:
    """Trials of other code."""
    old = [replace(row, code="old") for row in ROWS[2:]]
    assert kept(tmp_path / "old", [*ROWS[:2], *old]).to_confirm(IDS) == [
        THRIFTY.id,
        SLOW.id,
        SLOW.id,
        THRIFTY.id,
        THRIFTY.id,
        SLOW.id,
    ]
    assert kept(tmp_path / "all", old).to_confirm(IDS) == []


def test_a_trial_that_ended_when_a_command_was_killed_has_the_code_of_that_command(tmp_path: Path) -> None:
    made.write_record(tmp_path / SLOW.id)
    ledger = Ledger(tmp_path, kept(tmp_path, []).objective, "now", adopted_code="then")
    assert ledger.adopt(SLOW) is not None
    assert [(row.point, row.code) for row in read(tmp_path).rows] == [(SLOW.id, "then")]


def test_a_refusal_takes_no_measured_row_away_and_is_written_once(tmp_path: Path) -> None:
    ledger = kept(tmp_path, [ROWS[0]])
    for point in (SLOW, FAST):
        for _ in range(2):
            shown(ledger).refuse(point, ConfigError.of("gpu.memory_gib", "is too small", "Raise it."))
    assert [(row.point, row.status) for row in read(tmp_path).rows] == [(SLOW.id, "ok"), (FAST.id, "invalid")]
