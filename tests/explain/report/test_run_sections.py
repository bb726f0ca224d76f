"""The page and the Markdown report of a run have the same content in the same order."""

import re
from pathlib import Path

from tests.kit.made_run import made_run
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_rules import conclude
from wellfed.explain.report.run_lines import OF_EVERY_RUN, own_files, sections
from wellfed.explain.report.run_page import to_html
from wellfed.explain.report.write import to_markdown
from wellfed.record.entries import RunRecord
from wellfed.run.closing import _ARTIFACTS


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


def test_what_is_of_every_run_is_no_file_of_the_workload() -> None:
    assert set(_ARTIFACTS) <= OF_EVERY_RUN
    record = RunRecord("r", artifacts={**_ARTIFACTS, "profile": "profile/trace.json", "table": "forecasts_test.csv"})
    assert own_files(record) == {"table": "forecasts_test.csv"}
    assert own_files(RunRecord("r", artifacts=_ARTIFACTS)) == {}
