"""Ranks of a search's trials, and the pages made of them."""

import csv
import io
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from wellfed.study.board.files import to_csv, to_html
from wellfed.study.points.space import Choices, Numbers
from wellfed.study.ranking.ranking import leaderboard
from wellfed.study.rows import CurvePoint, Row, Rows, best_point, read_curve, reported_metrics
from wellfed.study.study_files import SearchFile

LR, DIM, DEPTH = "workload.optimizer.lr", "workload.model.dim", "workload.model.depth"
STRANGE = "<b>|`*\x1b[1m"


def file(mode: str = "max", **more: Any) -> SearchFile:
    known: dict[str, Any] = {
        "name": "mine", "workload": "recsys", "metric": "score", "mode": mode, "fixed": ("seed=1",),
        "space": {LR: Numbers(1e-4, 1e-1, is_log=True), DIM: Choices(("32", "64"))},
        "sampler": "tpe", "pruner": "median", "max_trials": 9, "code": "abc",
    }  # fmt: skip
    return SearchFile(**{**known, **more})


def row(trial: int, value: float | None, outcome: Any = "complete", **more: Any) -> Row:
    known: dict[str, Any] = {
        "point": f"p{trial}", "kind": "trial", "overrides": ("seed=1", f"{LR}=0.0{trial + 1}", f"{DIM}=32"),
        "status": "ok", "attempt": 1, "folder": f"p{trial}", "code": "abc", "trial": trial,
        "validations": 3, "trained_steps": 12,
    }  # fmt: skip
    return Row(**{**known, "outcome": outcome, "value": value, "last_value": value, **more})


VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8)


@given(VALUES, st.sampled_from(["max", "min"]))
def test_ranks_go_by_the_metric_and_equal_values_share_one(values, mode):
    rows = tuple(row(number, value) for number, value in enumerate(values))
    made = leaderboard(file(mode), Rows(rows))
    ranked = [entry.row.value for entry in made.ranked]
    assert ranked == sorted(values, reverse=mode == "max")
    for entry in made.ranked:
        better = sum((other > entry.row.value) if mode == "max" else (other < entry.row.value) for other in values)
        assert entry.rank == 1 + better
    assert made.best is not None
    assert made.best.row.value == (max if mode == "max" else min)(values)


def test_what_was_not_trained_to_its_end_has_no_rank_and_says_why():
    rows = (
        row(0, 0.5),
        row(1, 0.9, "pruned", validations=2, trained_steps=8),
        row(2, None, "failed", status="oom", error={"kind": "device_oom", "message": "no room", "advice": "Less."}),
        row(3, None, "failed"),
        row(4, None, "failed", status="killed", exit_code=-9),
    )
    made = leaderboard(file(), Rows(rows))
    assert [entry.row.trial for entry in made.ranked] == [0]
    assert [(entry.status, entry.why) for entry in made.entries[1:]] == [
        ("pruned", "ended after 2 validations, 8 steps"),
        ("oom", "no room Less. Log: p2/stderr.txt"),
        ("ok", "ended well, but without a metric: validation gave no finite figure of the metric"),
        ("killed", "exit code -9"),
    ]
    assert made.counts == {"complete": 1, "pruned": 1, "failed": 3}


@given(st.lists(st.tuples(st.integers(1, 9), st.floats()), max_size=6), st.booleans())
def test_the_best_point_is_the_last_of_the_best_finite_as_the_best_checkpoint_is(points, higher):
    curve = [CurvePoint(step, value) for step, value in points]
    best = best_point(curve, higher_is_better=higher)
    finite = [value for _, value in points if abs(value) < float("inf")]
    if best is None:
        assert not finite
    else:
        assert best.value == (max if higher else min)(finite)
        assert best.step == max(step for step, value in points if value == best.value)


def test_a_curve_is_read_as_far_as_it_goes(tmp_path: Path):
    lines = ["step,epoch,time_s,split,name,value", "4,0,1,val,score,0.5", "4,0,1,train,score,9", "4,0,1,val,loss,1",
             "8,1,2,val,score,0.7", "12,2,3,val,sco"]  # fmt: skip
    (tmp_path / "metrics.csv").write_text("\n".join(lines))
    assert read_curve(tmp_path, "score") == [CurvePoint(4, 0.5), CurvePoint(8, 0.7)]
    assert "loss" in reported_metrics(tmp_path)
    assert read_curve(tmp_path / "none", "score") == []


def made_board() -> Any:
    rows = (
        row(0, 0.5),
        row(1, 0.75, overrides=("seed=1", f"{LR}=0.0123456789", f"{DIM}=64")),
        row(2, 0.6),
        row(3, 0.1, "pruned"),
        row(4, None, "failed", status="failed", error={"message": STRANGE}, stderr=(STRANGE,)),
    )
    return leaderboard(file(name=STRANGE), Rows(rows))


def test_the_table_for_programs_has_all_digits():
    (first, *_, last) = csv.DictReader(io.StringIO(to_csv(made_board())))
    assert (first["rank"], first["value"], first[LR], first[DIM]) == ("1", "0.75", "0.0123456789", "64")
    assert first["overrides"] == f"seed=1 {LR}=0.0123456789 {DIM}=64"
    assert (last["rank"], last["state"], last["status"]) == ("", "failed", "failed")


def test_the_page_has_no_html_of_the_users():
    page = to_html(made_board())
    assert "<b>|" not in page
    assert "\x1b" not in page
    assert "0.01235" in page


NO_NUMBERS = (float("nan"), float("inf"), float("-inf"))
