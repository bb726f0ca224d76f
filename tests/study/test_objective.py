"""What ranks a sweep: the same planted rows have another winner for each objective, in all that a user sees."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.kit import made
from wellfed.config.schema import SweepObjective
from wellfed.errors import ConfigError
from wellfed.study.board.columns import columns
from wellfed.study.board.files import to_csv, to_html
from wellfed.study.board.terminal import show
from wellfed.study.objective import OBJECTIVES
from wellfed.study.ranking.board_entry import Entry, Leaderboard
from wellfed.study.ranking.ranking import chosen, leaderboard, score_text
from wellfed.study.rows import Row, Rows

AXES = {"loader": ("baseline", "balanced", "aggressive")}
POINTS = BASELINE, THRIFTY, FAST = made.sweep_file(AXES).points
FIGURES = ((100.0, 0.05, 2.0), (200.0, 0.01, 3.0), (400.0, 0.02, 8.0))
"""Samples/s, joules a sample, GiB."""
BEST = {"samples_per_s": FAST, "samples_per_joule": THRIFTY, "peak_memory": BASELINE}


def rows(*figures: tuple[float, float, float]) -> list[Row]:
    return [
        made.row(point, rate, energy_per_sample_j=joules, peak_memory_gib=peak)
        for point, (rate, joules, peak) in zip(POINTS, figures or FIGURES, strict=True)
    ]


def board(objective: str, found: Sequence[Row] | None = None) -> Leaderboard:
    sweep = made.sweep_file(AXES, objective=objective)
    return leaderboard(sweep, Rows(tuple(rows() if found is None else found)))


def of(found: Leaderboard, point: object) -> Entry:
    return next(entry for entry in found.entries if entry.point == point.id)


def test_the_knob_and_the_table_name_the_same() -> None:
    assert [each.value for each in SweepObjective] == list(OBJECTIVES)


def test_scores_and_ratios_are_better_the_higher_whatever_is_measured() -> None:
    speed, joules, memory = (board(name) for name in OBJECTIVES)
    assert [of(each, FAST).score for each in (speed, joules, memory)] == [400, pytest.approx(50), 8]
    assert of(speed, FAST).of_baseline == 4
    assert of(joules, FAST).of_baseline == pytest.approx(2.5)
    assert of(memory, FAST).of_baseline == pytest.approx(0.25)
    assert of(memory, THRIFTY).of_best == pytest.approx(2 / 3)


@pytest.mark.parametrize("objective", ["samples_per_joule", "peak_memory"])
@pytest.mark.parametrize("missing", [None, float("nan")])
def test_a_row_without_the_figure_has_no_rank_and_says_why(objective: str, missing: float | None) -> None:
    lacking = replace(rows()[2], energy_per_sample_j=missing, peak_memory_gib=missing)
    found = board(objective, [*rows()[:2], lacking])
    entry, noun = of(found, FAST), OBJECTIVES[objective].a_noun
    assert (entry.status, entry.rank, entry.score) == ("ok", None, None)
    assert entry.why == f"ended well, but without {noun}: {OBJECTIVES[objective].missing}"
    assert entry.why in to_html(found).replace("&#39;", "'")
    with pytest.raises(ConfigError, match=f"it is ok, but {OBJECTIVES[objective].missing}"):
        chosen(found, FAST.id)


@pytest.mark.parametrize(
    ("objective", "head", "words"),
    [
        ("samples_per_s", "triplets/s", "400 triplets/s"),
        ("samples_per_joule", "triplets/J", "100 triplets/J"),
        ("peak_memory", "peak", "2.00 GiB"),
    ],
)
def test_all_that_users_see_is_about_it(objective: str, head: str, words: str) -> None:
    found, best = board(objective), OBJECTIVES[objective].best
    heads = [column.head for column in columns(found)]
    assert heads[0] == head
    assert {"triplets/s", "triplets/J", "peak"} <= set(heads)
    assert len(heads) == len(set(heads))
    assert score_text(found, found.ranked[0]).startswith(words)
    page = to_html(found)
    assert f"{best.capitalize()}:" in page
    assert "<strong>" + words.split()[0] in page
    stream = io.StringIO()
    show(Console(file=stream, width=160), found, [Path("a/leaderboard.csv")])
    assert f"Keep the {best}: " in stream.getvalue()
    (first, *_) = csv.DictReader(io.StringIO(to_csv(found), newline=""))
    assert float(first["score"]) == found.ranked[0].score
    assert first["point"] == BEST[objective].id
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["objective"] == objective
