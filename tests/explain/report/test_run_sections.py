"""What is told of a run comes in one order, whoever tells it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.kit.made_run import made_run
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_rules import conclude
from wellfed.explain.report.run_page import to_html
from wellfed.explain.report.run_sections import OF_EVERY_RUN, file_sections, own_files, sections
from wellfed.explain.report.write import to_markdown
from wellfed.record import RunRecord
from wellfed.run import screen
from wellfed.run.bookkeeper import _ARTIFACTS

ORDER = [
    "verdict",
    "findings",
    "utilisation",
    "time",
    "memory",
    "metrics",
    "files",
    "plan",
    "machine",
    "events",
    "started",
]


def judged(folder: Path) -> Evidence:
    made_run(
        folder,
        steps=60,
        status="failed",
        artifacts={"log": "train.log", "map": "class_map.png"},
        error={"kind": "code", "message": "KeyError: no", "advice": "Mend it."},
        events=[{"kind": "nan", "step": 7, "time_s": 12.0}, {"kind": "checkpoint", "step": 9, "time_s": 13.0}],
    )
    evidence = Evidence.read(folder)
    conclude(evidence)
    return evidence


def on_screen(record: RunRecord, folder: Path) -> str:
    console = screen.Terminal(record=True, width=120, file=open(os.devnull, "w"))  # noqa: SIM115
    screen.show_end(console, record, {}, folder)
    console.file.close()
    return console.export_text()


def test_page_report_and_screen_say_the_same_in_the_same_order(tmp_path: Path) -> None:
    evidence = judged(tmp_path)
    told = sections(evidence.record, evidence.first_metrics)
    assert [section.name for section in told] == ORDER
    assert re.findall(r'<section id="(\w+)"', to_html(evidence, tmp_path)) == ORDER
    markdown = to_markdown(evidence.record, evidence.first_metrics)
    assert re.findall(r"^## (.*)$", markdown, re.MULTILINE) == [section.title for section in told]
    shown = on_screen(evidence.record, tmp_path)
    lines = [line for section in sections(evidence.record) for line in section.on_screen]
    assert len(lines) > 10
    places = [shown.find(line) for line in lines]
    assert -1 not in places
    assert places == sorted(places)


def test_all_lines_of_a_section_stand_in_both_reports(tmp_path: Path) -> None:
    evidence = judged(tmp_path)
    page = re.sub(r"<[^>]*>", "", to_html(evidence, tmp_path)).replace("&#39;", "'").replace("&#34;", '"')
    markdown = to_markdown(evidence.record, evidence.first_metrics)
    for section in sections(evidence.record, evidence.first_metrics):
        for line in section.lines if section.name != "findings" else ():  # there the page shows the parts
            assert line in markdown
            assert line.removeprefix("failed: ") in page
        for cell in (cell for row in section.rows for cell in row):
            assert cell in markdown
            assert cell in page
    for finding in evidence.record.findings:
        assert finding["message"] in page
        assert " ".join(finding["change"]) in page


def test_the_screen_leaves_out_what_it_has_shown_before(tmp_path: Path) -> None:
    shown = on_screen(judged(tmp_path).record, tmp_path)
    assert "KeyError" not in shown  # on stderr
    assert "one less than the cores" not in shown  # in the plan, at the start
    assert "- event nan: step=7\n" in shown
    assert "checkpoint" not in shown
    assert "- val/loss 0.5\n" in shown


def test_a_record_with_nothing_in_it_has_its_sections() -> None:
    told = {section.name: section for section in sections(RunRecord("r"))}
    assert list(told) == [name for name in ORDER if name != "files"]
    headline, state, amount = told["verdict"].lines
    assert (headline, amount) == ("running: 0 steps in 0 ms", "0 epochs, 0 samples")
    assert state.startswith("It still runs")
    assert told["utilisation"].lines == ["Neither a GPU nor the host was watched."]
    assert told["machine"].lines == ["Nobody looked at it."]
    assert told["started"].lines[0] == "overrides: none"


def test_what_is_of_every_run_is_no_file_of_the_workload() -> None:
    assert set(_ARTIFACTS) <= OF_EVERY_RUN
    record = RunRecord("r", artifacts={**_ARTIFACTS, "profile": "profile/trace.json", "table": "forecasts_test.csv"})
    assert own_files(record) == {"table": "forecasts_test.csv"}
    assert file_sections(RunRecord("r", artifacts=_ARTIFACTS)) == []
