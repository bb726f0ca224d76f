"""The page of a run: it stands whatever became of the run, shows all text as text, and fits a phone."""

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.kit.browser import opened
from tests.kit.evidence_of import evidence
from tests.kit.few import few
from tests.kit.made_run import made_run
from tests.kit.page_reader import Page, read_page
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_rules import conclude
from wellfed.explain.report.pictures import run_pictures
from wellfed.explain.report.run_page import tiles, to_html
from wellfed.explain.report.write import write_reports
from wellfed.record.entries import RunRecord

TRACES = Path(__file__).parents[2] / "traces"
EVIL = "<script>alert(1)</script>\x1b[31m\udc80\u202e&lt;\"'><img src=x onerror=alert(1)>"
SECRET_SHOWN = "<script>alert(1)</script>\\x1b[31m\\udc80\\u202e&lt;\"'><img src=x onerror=alert(1)>"
ERROR = {"kind": "device_oom", "message": "Out of memory\nafter 4 steps down", "advice": "Take gpu=16gb."}


def page_of(folder: Path) -> Page:
    evidence = Evidence.read(folder)
    conclude(evidence)
    return read_page(to_html(evidence, folder))


def pictures_of(page: Page) -> list[str]:
    return [value for name, value in page.attributes if name == "aria-label"]


def test_the_verdict_comes_first_with_what_to_copy(tmp_path: Path) -> None:
    made_run(tmp_path, period_s=9.5, steps=1200, ceiling={"samples_per_s": 1e4})
    page = page_of(tmp_path)
    words = (
        "1,200 steps in",
        "Starved",
        "loader.num_workers=6",
        "of the ceiling",
        "slow_copy",
        "since the run started",
    )
    places = [page.text.find(word) for word in words]
    assert -1 not in places
    assert places == sorted(places)
    assert ("class", "copy") in page.attributes
    assert "About" in page.text


@pytest.mark.parametrize(("wait_ms", "note"), [(10.0, ""), (0.0, " (doubtful)")])
def test_the_tile_of_a_ceiling_that_waiting_contradicts_is_marked(wait_ms: float, note: str) -> None:
    found = {tile.label: tile for tile in tiles(evidence(wait_ms=wait_ms, ceiling=2.0).record)}
    assert found["of the ceiling"].note.endswith(f" possible{note}")


def test_pictures_tell_what_they_show(tmp_path: Path) -> None:
    made_run(tmp_path, period_s=9.5, steps=1200)
    told = pictures_of(page_of(tmp_path))
    assert len(told) == 6
    assert re.match(r"Utilisation over time. GPU 0: mean .* %, from .*", told[0])
    assert "Time of a step over 1,200 steps: wait" in told[2]
    assert "budget, 7.20 GiB" in told[3]
    assert told[4].startswith("loss over steps; latest: train 0.5")


@pytest.mark.parametrize(
    ("made", "pictures"),
    few(
        [
            ({"steps": 0, "has_telemetry": False}, 0),
            ({"steps": 0, "has_telemetry": False, "memory": {}, "machine": {}, "plan": {}, "status": "failed"}, 0),
            ({"steps": 1}, 3),
            ({"steps": 200, "has_telemetry": False}, 1),
            ({"gpus": 0, "memory": {"device": "A CPU", "budget_gib": None, "measured_peak_gib": 0.25}}, 3),
            ({"gpus": 8, "period_s": 1.0, "steps": 400}, 11),
            ({"is_mig": True}, 4),
            ({"status": "oom", "error": ERROR, "events": [{"kind": "oom", "step": 7, "time_s": 12.0}] * 40}, 4),
            ({"status": "running", "host_name": "elsewhere"}, 4),
            ({"events": [{"kind": "resume", "step": 9, "time_s": 1e9}, {"kind": "new_kind", "step": None}]}, 4),
            ({"gpus": 64, "steps": 100}, 19),
        ],
        4,
    ),
)
def test_any_run_has_a_page(made: dict[str, Any], pictures: int, tmp_path: Path) -> None:
    record = made_run(tmp_path, metrics={}, **made)
    page = page_of(tmp_path)
    assert len(pictures_of(page)) == pictures
    assert RunRecord.read(tmp_path).status in page.text
    if record.error:
        assert "device_oom: Out of memory after 4 steps down" in page.text
        assert "Take gpu=16gb." in page.text


def test_no_text_of_the_user_s_is_more_than_text(tmp_path: Path) -> None:
    made_run(
        tmp_path,
        metrics={EVIL: ("train", EVIL), "a$_{b}$": ("val",), "x" * 300: ("train",)},
        workload=EVIL,
        run_id=EVIL,
        overrides=[EVIL, *(f"workload.data.path{number}='/a b/{'x' * 200}'" for number in range(200))],
        plan={EVIL: {"value": [EVIL, "y" * 500], "because": EVIL, "source": "set"}},
        error={"kind": EVIL, "message": EVIL, "advice": EVIL},
        events=[{"kind": EVIL, "step": 3, "time_s": 12.0, EVIL: EVIL}],
        ended_by=EVIL,
        resumed_from=EVIL,
        throughput={"samples_per_s": 3.0, "ci95": None, "steps": 197, "warmup_steps": 3, "sample_unit": EVIL},
    )
    page = page_of(tmp_path)
    assert page.text.count(SECRET_SHOWN) > 12
    assert "a$_{b}$" in page.text
    write_reports(Evidence.read(tmp_path), tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "<" not in text.replace("<br>", "")
    assert "\x1b" not in text


def test_a_run_on_the_cpu_has_no_pictures_of_the_gpus_that_others_use(tmp_path: Path) -> None:
    record = made_run(tmp_path, gpus=2, metrics={})
    plan = {"trainer.accelerator": {"value": "cpu", "because": "", "source": "set"}}
    replace(record, plan={**record.plan, **plan}).write(tmp_path)
    given = Evidence.read(tmp_path)
    drawn = run_pictures.pictures(given, tmp_path)
    assert [one.title for one in drawn["utilisation"]] == ["CPU"]
    assert given.telemetry.gpus == []
    assert all("this process" in chart.told for one in drawn["memory"] for chart in one.charts)


def test_a_table_that_breaks_off_or_jumps_has_pictures(tmp_path: Path) -> None:
    """A run that was resumed after a pause, whose clock went on, and that was killed within a row."""
    made_run(tmp_path, steps=400)
    lines = (tmp_path / "telemetry.csv").read_text().splitlines(keepends=True)
    later = [re.sub(r"^[\d.]+", lambda at: f"{float(at[0]) + 500:.6g}", line) for line in lines[1:]]
    (tmp_path / "telemetry.csv").write_text("".join([*lines, *later, "1000,4"]))
    (tmp_path / "steps.csv").write_text((tmp_path / "steps.csv").read_text()[:-9])
    assert len(pictures_of(page_of(tmp_path))) == 6


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(TRACES.glob("*/*.json.gz"))[::7], ids=lambda path: path.name.split(".")[0])
def test_a_recorded_run_has_a_page(path: Path, tmp_path: Path) -> None:
    for file, text in json.loads(gzip.decompress(path.read_bytes()))["files"].items():
        (tmp_path / file).write_text(text)
    record = json.loads((tmp_path / "run.json").read_text())
    if record["time"]:
        record["time"].setdefault("step_ms_mean", record["time"]["step_ms_p50"])  # younger than the recorded runs
    (tmp_path / "run.json").write_text(json.dumps(record))
    assert len(pictures_of(page_of(tmp_path))) >= 2


@pytest.mark.slow
@pytest.mark.parametrize(("width", "is_dark"), [(360, True), (1280, False)])
def test_a_browser_shows_all_of_it(width: int, is_dark: bool, chromium: Path, tmp_path: Path) -> None:
    made_run(
        tmp_path,
        steps=3000,
        gpus=2,
        period_s=9.5,
        metrics={"loss": ("train", "val"), "x" * 300: ("train",), "ndcg_at_10": ("val", "test")},
        overrides=[f"workload.data.path='/a b/{'x' * 200}'"],
        plan={"k" * 40: {"value": [1] * 40, "because": "y" * 300, "source": "set"}},
        status="oom",
        error=ERROR,
        ceiling={"samples_per_s": 1e5},
        events=[{"kind": kind, "step": 7, "time_s": 20.0} for kind in ("oom", "step_down", "ladder", "nan", "resume")],
    )
    evidence = Evidence.read(tmp_path)
    conclude(evidence)
    write_reports(evidence, tmp_path)
    found = opened(chromium, tmp_path / "report.html", tmp_path / "browser", width=width, is_dark=is_dark)
    assert (found["width"], found["dark"], found["console"]) == (width, is_dark, [])
    assert found["scrolls"] <= width
    assert (found["wide"], found["cut"], found["overlaps"]) == ([], [], [])
    assert len(found["pictures"]) == 8
    assert all(wide > 200 and high > 50 for wide, high in found["pictures"])
    assert found["paper"] == ("rgb(20, 23, 27)" if is_dark else "rgb(255, 255, 255)")


def test_the_page_links_to_the_files_of_an_evaluation_that_are_there(tmp_path: Path) -> None:
    left = {"confusion": "confusion matrix.csv", "gone": "gone.csv", "odd": "a\0b", "long": "x" * 5000}
    made_run(tmp_path, artifacts=left)
    (tmp_path / "confusion matrix.csv").write_text("true,predicted\n")
    page = to_html(Evidence.read(tmp_path), tmp_path)
    assert 'href="confusion%20matrix.csv"' in page
    assert 'href="gone.csv"' not in page
