"""Both files of a leaderboard: programs read one, people the other."""

import csv
import html
import io
import re
import shlex
from pathlib import Path

from tests.kit import made
from wellfed.config.compose import Composed
from wellfed.config.entry import main
from wellfed.config.schema import RunConfig
from wellfed.study.board.files import CSV, to_csv, to_html, write
from wellfed.study.ranking.board_entry import Leaderboard
from wellfed.study.ranking.ranking import leaderboard
from wellfed.study.rows import Row, Rows
from wellfed.study.study_files import SweepFile

ODD = ("[16, 8]", "a,b", 'say "hi"', "it's", "$(rm x) | y", "two\nlines", "ü ✓", "")


def board(sweep: SweepFile, rows: list[Row] | None = None) -> Leaderboard:
    return leaderboard(sweep, Rows(tuple(made.rows(sweep) if rows is None else rows)))


def table(found: Leaderboard) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(to_csv(found), newline="")))


def test_each_point_has_a_row_in_the_leaderboards_order() -> None:
    found = board(made.sweep_file())
    rows = table(found)
    assert [row["point"] for row in rows] == [entry.point for entry in found.entries]
    assert rows[0]["rank"] == "1"
    assert float(rows[0]["samples_per_s"]) == found.entries[0].row.samples_per_s
    assert float(rows[0]["ci95_low"]) < float(rows[0]["samples_per_s"]) < float(rows[0]["ci95_high"])
    assert (rows[-1]["status"], rows[-1]["rank"], rows[-1]["samples_per_s"]) == ("pending", "", "")
    assert "KeyError: '<b>\"embedding\"</b> & more'" in next(r["why"] for r in rows if r["status"] == "failed")


def test_odd_overrides_can_be_pasted_into_a_shell() -> None:
    sweep = made.sweep_file({"odd": ODD}, fixed=("name='a b'",))
    found = board(sweep, [made.row(point) for point in sweep.points])
    rows = table(found)
    assert {row["odd"] for row in rows} == set(map(str, ODD))
    for row in rows:
        assert shlex.split(row["overrides"]) == ["name='a b'", f"odd={row['odd']}"]


def test_printed_commands_compose_and_name_the_folder(tmp_path: Path) -> None:
    (tmp_path / "my configs").mkdir()
    fixed = ("sweep=quick", "sweep.trial_steps=20", "workload=recsys", "logger=none")
    sweep = made.sweep_file({"seed": ("1",)}, fixed, flags=(f"--config-dir={tmp_path / 'my configs'}",))
    found = board(sweep, [made.failed_row(sweep.points[0], "failed")])
    (alone,) = re.findall(r"<dt>alone</dt><dd><code>python src/train.py (.*)</code>", html.unescape(to_html(found)))
    jobs: list[Composed[RunConfig]] = []
    for typed in (alone, table(found)[0]["overrides"]):
        assert main("train", lambda composed: jobs.append(composed) or 0, shlex.split(typed)) == 0
    assert [job.overrides for job in jobs] == [("workload=recsys", "logger=none", "seed=1")] * 2
    named = write(tmp_path, board(sweep, [made.row(sweep.points[0])]))[-1].read_text()
    assert f"choose {shlex.quote(str(tmp_path))} --name mine" in html.unescape(named)


def test_both_files_are_written_and_replaced(tmp_path: Path) -> None:
    sweep = made.sweep_file()
    folder = made.write(tmp_path / "sweep", sweep)
    found = board(sweep)
    (folder / CSV).write_text("old")
    before = {path.name for path in folder.iterdir()}
    paths = write(folder, found)
    assert [path.name for path in paths] == ["leaderboard.csv", "leaderboard.html"]
    assert {path.name for path in folder.iterdir()} == before | {path.name for path in paths}
    assert (folder / CSV).read_text() == to_csv(found)
    assert write(folder, found) == paths
