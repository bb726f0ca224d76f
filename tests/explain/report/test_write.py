"""Both reports are written as wholes, and the words first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.made_run import made_run
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.report import write
from wellfed.explain.report.write import write_reports


def test_both_are_there_and_nothing_else(tmp_path: Path) -> None:
    made_run(tmp_path, steps=1, has_telemetry=False, metrics={})
    before = {path.name for path in tmp_path.iterdir()}
    write_reports(Evidence.read(tmp_path), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} - before == {"report.md", "report.html"}
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


def test_a_page_is_left_out_where_nobody_asks_for_it(tmp_path: Path) -> None:
    write_reports(Evidence.read(_one(tmp_path)), tmp_path, has_page=False)
    assert not (tmp_path / "report.html").exists()
    assert (tmp_path / "report.md").exists()


def test_what_can_t_be_drawn_leaves_the_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(evidence: Evidence, folder: Path) -> str:
        raise KeyError("a font")

    monkeypatch.setattr(write, "to_html", broken)
    with pytest.raises(KeyError):
        write_reports(Evidence.read(_one(tmp_path)), tmp_path)
    assert (tmp_path / "report.md").exists()


def _one(folder: Path) -> Path:
    made_run(folder, steps=1, has_telemetry=False, metrics={})
    return folder
