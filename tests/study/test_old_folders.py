"""Folders of the version before the one study: their ledgers read, and their boards come out as they did then."""

import json
from pathlib import Path

import pytest

from wellfed.study import ledger
from wellfed.study.board import step_table
from wellfed.study.board.files import to_csv, to_html, to_markdown
from wellfed.study.ranking.ranking import board_of
from wellfed.study.study_files import TuneFile

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
    found = TuneFile.read(OLD / "tune")
    assert found.status == "done"
    assert len(found.beside_seconds) == len(found.steps) == 2


def test_the_page_of_an_old_tune_is_that_of_then_but_for_what_its_file_lacks() -> None:
    then = (OLD / "tune" / "tune.md").read_text().splitlines()
    left_out = ("Noise between runs", "No options were written")
    kept = "\n".join(line for line in then if not line.startswith(left_out))
    while "\n\n\n" in kept:
        kept = kept.replace("\n\n\n", "\n\n")
    assert step_table.page(TuneFile.read(OLD / "tune")) == kept + "\n"
