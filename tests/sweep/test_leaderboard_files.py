"""The files of a leaderboard: for programs, for people, and for a browser."""

from __future__ import annotations

import csv
import shlex
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.sweep.made import failed_row, row, rows, sweep_file
from wellfed.sweep import leaderboard_files
from wellfed.sweep.leaderboard import Leaderboard, leaderboard
from wellfed.sweep.leaderboard_html import to_html
from wellfed.sweep.ledger import Read

VOID = {"meta", "br", "hr", "img", "input", "link", "path", "circle", "rect", "line", "use", "col"}
EVIL = ("</td><script>alert(1)</script>", "a|b`c", "[1,{x: '\"'}]", "größer", "x" * 120)


def board(axes=None, made=None) -> Leaderboard:
    sweep = sweep_file() if axes is None else sweep_file(axes)
    return leaderboard(sweep, Read(tuple(rows(sweep) if made is None else made(sweep)), ()))


def ok(sweep):
    return [row(point, 100.0 + number, peak_memory_gib=1.0) for number, point in enumerate(sweep.points)]


BOARDS = {
    "all ends": board(),
    "one point": board({"loader": ("auto",)}, ok),
    "one axis": board({"loader": ("auto", "baseline")}, ok),
    "many": board({"seed": tuple(map(str, range(50))), "loader": ("auto", "baseline", "balanced")}, ok),
    "all failed": board({"seed": ("1", "2")}, lambda sweep: [failed_row(point, "failed") for point in sweep.points]),
    "none finished": board({"seed": ("1", "2")}, lambda sweep: []),
    "odd values": board({"workload.data.text": EVIL}, ok),
}


class Tags(HTMLParser):
    """All that a page names, and whether its tags close."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: set[str] = set()
        self.targets: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        self.targets += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.names.add(tag)

    def handle_endtag(self, tag):
        while self.open and self.open[-1] != tag and self.open[-1] in ("li", "p", "td", "th", "tr", "dt", "dd"):
            self.open.pop()
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.mark.parametrize("name", BOARDS)
def test_the_page_is_whole_and_asks_nobody_for_anything(name: str):
    page = to_html(BOARDS[name])
    found = Tags(page)
    assert found.open in ([], ["html"], ["html", "body"])
    assert "script" not in found.names
    assert not [target for target in found.targets if not target.startswith(("#", "data:"))]
    assert "url(http" not in page


def test_what_users_wrote_is_text():
    page = to_html(BOARDS["odd values"])
    assert "<script>" not in page
    assert all(value in Tags(page).text for value in EVIL)
    assert '<b>"embedding"</b> & more' in Tags(to_html(BOARDS["all ends"])).text


@pytest.mark.parametrize("name", BOARDS)
def test_the_table_for_programs_has_a_row_a_point(name: str, tmp_path: Path):
    found = BOARDS[name]
    written = leaderboard_files.write(tmp_path, found)
    assert sorted(path.name for path in written) == ["leaderboard.csv", "leaderboard.html", "leaderboard.md"]
    with (tmp_path / "leaderboard.csv").open(encoding="utf-8", newline="") as stream:
        table = csv.DictReader(stream)
        lines = list(table)
    assert table.fieldnames[:3] == ["rank", "point", "status"]
    assert [line["point"] for line in lines] == [entry.point for entry in found.entries]
    for line, entry in zip(lines, found.entries, strict=True):
        assert line["status"] == entry.status
        assert tuple(shlex.split(line["overrides"])) == entry.overrides
        assert (line["samples_per_s"] == "") == (entry.samples_per_s is None)
        assert all(line[axis] == value for axis, value in entry.values.items())


def test_tables_in_markdown_keep_their_columns():
    text = leaderboard_files.to_markdown(BOARDS["odd values"])
    (head,) = [line for line in text.splitlines() if line.startswith("| rank")]
    lines = text[text.index(head) :].split("\n\n")[0].splitlines()
    assert len(lines) == 2 + len(EVIL)
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1


def test_a_browser_shows_it(chromium: Path, tmp_path: Path):
    leaderboard_files.write(tmp_path, BOARDS["all ends"])
    page = (tmp_path / "leaderboard.html").as_uri()
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    shot = tmp_path / "shot.png"
    for more in (["--dump-dom"], [f"--screenshot={shot}", "--window-size=1400,2700"]):
        done = subprocess.run([chromium, *flags, *more, page], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        if "--dump-dom" in more:
            assert BOARDS["all ends"].ranked[0].point in done.stdout
    assert shot.stat().st_size > 50_000
