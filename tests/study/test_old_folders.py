"""Folders of the version before the one study: their ledgers read, and their boards come out as they did then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from wellfed.study import ledger
from wellfed.study.board.files import to_csv, to_html, to_markdown
from wellfed.study.ranking.ranking import board_of
from wellfed.study.tune import tune_file

OLD = Path(__file__).with_name("old")


@pytest.mark.parametrize("name", ["sweep", "grid", "optuna"])
def test_the_board_of_an_old_folder_is_that_of_then(name: str) -> None:
    board = board_of(OLD / name)
    assert to_csv(board) == (OLD / name / "leaderboard.csv").read_text()
    assert to_markdown(board) == (OLD / name / "leaderboard.md").read_text()
    assert board.file.name in to_html(board)
    found, then = json.loads(json.dumps(board.to_dict())), json.loads((OLD / name / "board.json").read_text())
    assert found.keys() == then.keys()
    assert found == {**then, "entries": found["entries"]}
    for now, before in zip(found["entries"], then["entries"], strict=True):
        if before.get("row"):
            assert before["row"].items() <= now["row"].items()
        assert {**before, "row": None}.items() <= {**now, "row": None}.items()


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("sweep", {"trial": 4, "confirm": 6}),
        ("grid", {"trial": 4}),
        ("optuna", {"trial": 4}),
        ("tune", {"trial": 2, "confirm": 6}),
    ],
)
def test_an_old_ledger_reads_and_its_lines_are_written_as_they_were(name: str, kinds: dict[str, int]) -> None:
    found = ledger.read(OLD / name)
    assert found.damaged == ()
    assert {kind: sum(row.kind == kind for row in found.rows) for kind in kinds} == kinds
    lines = (OLD / name / ledger.FILE_NAME).read_text().splitlines()
    assert [json.loads(row.to_line()) for row in found.rows] == [json.loads(line) for line in lines]


def test_an_old_tune_goes_on_with_what_it_measured() -> None:
    found = tune_file.read(OLD / "tune")
    assert found is not None
    assert found["status"] == "done"
    assert len(tune_file.beside_of(found)) == len(found["steps"]) == 2
