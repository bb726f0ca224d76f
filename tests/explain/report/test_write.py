"""Both reports are written as wholes, and the words first."""

import re
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.kit.made_run import made_run
from wellfed import project
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_rules import conclude
from wellfed.explain.report import finding_pages, run_page
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

    monkeypatch.setattr(run_page, "to_html", broken)
    with pytest.raises(KeyError):
        write_reports(Evidence.read(_one(tmp_path)), tmp_path)
    assert (tmp_path / "report.md").exists()


def test_findings_link_to_their_pages_where_these_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a b" / "run"
    folder.mkdir(parents=True)
    made_run(folder, steps=200)

    def written() -> tuple[str, str]:
        evidence = Evidence.read(folder)
        conclude(evidence)
        first = evidence.record.findings[0]
        evidence.record.findings.append({**first, "id": "of_a_plugin", "text": "."})
        write_reports(evidence, folder)
        return (folder / "report.md").read_text(), (folder / "report.html").read_text()

    text, page = written()
    links = re.findall(r"^- \[(\w+)\]\((\S+)\) \(", text, flags=re.MULTILINE)
    assert [name for name, _ in links] == ["too_few_workers"]
    assert re.findall(r'<a href="(\S+)">(\w+)</a>', page)[-1:] == [links[0][::-1]]
    assert (folder / links[0][1]).resolve() == Path(__file__).parents[3] / "docs" / "findings" / "too_few_workers.md"
    assert "\n- of_a_plugin (" in text
    assert "<h3>of_a_plugin <small>" in page

    monkeypatch.setattr(project, "ENGINE", tmp_path / "site-packages" / "wellfed")
    monkeypatch.setattr(finding_pages.sysconfig, "get_path", lambda name: str(tmp_path / f"{name} of the environment"))
    text, page = written()
    assert "findings/" not in text + page
    assert "<small>too_few_workers</small>" in page

    installed = tmp_path / "data of the environment" / "share" / "wellfed" / "findings" / "too_few_workers.md"
    installed.parent.mkdir(parents=True)
    installed.touch()
    text, _ = written()
    ((_, link),) = re.findall(r"^- \[(\w+)\]\((\S+)\) \(", text, flags=re.MULTILINE)
    assert (folder / unquote(link)).samefile(installed)


def _one(folder: Path) -> Path:
    made_run(folder, steps=1, has_telemetry=False, metrics={})
    return folder
