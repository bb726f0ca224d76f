"""The page of two runs: pictures and figures are there, what users typed is shown as text, and a browser renders it."""

import gzip
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.kit.browser import with_script
from tests.kit.evidence_of import evidence
from tests.kit.page_reader import Page, read_page
from tests.study.board.test_pages import EVIL, QUOTE
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_rules import conclude
from wellfed.explain.report.comparison import Comparison
from wellfed.explain.report.comparison_page import comparison_html

TRACES = Path(__file__).parents[2] / "traces" / "simulated"


def recorded(folder: Path, name: str) -> Evidence:
    """A run on the simulated card, as it was recorded."""
    folder.mkdir()
    for file, text in json.loads(gzip.decompress((TRACES / f"{name}.json.gz").read_bytes()))["files"].items():
        (folder / file).write_text(text)
    found = Evidence.read(folder)
    assert found.record.time is not None
    found.record.time["step_ms_mean"] = found.steps.mean_ms or 0.0  # younger than the recorded runs
    conclude(found)
    return found


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """One that waits for its data, and one that does not."""
    folder = tmp_path_factory.mktemp("runs")
    names = ("starved_card_pictures", "workers_on_card_pictures")
    return Comparison(*(recorded(folder / name, name) for name in names))


def test_two_real_runs_have_figures_pictures_and_findings(real: Comparison) -> None:
    found = Page(comparison_html(real))
    assert found.charts
    labels = [value for name, value in found.attributes if name == "aria-label"]
    assert labels[0].startswith("Parts of a mean step. A: wait 12.8 ms, compute 44.7 ms; B: compute ")
    for words in (
        "The rates of A and B are not compared. What is learned differs (workload.data.build_steps)",
        "1.32 times (1.29 to 1.35)",
        "loading_in_main_process",
        "What was set differently",
        "processes",
        "loader.num_workers",
        "Nothing differs.",
    ):
        assert words in found.text, words


@pytest.mark.parametrize("evil", [EVIL, QUOTE, "</style><b>", "\x1b[31m${x}"])
def test_every_text_of_the_users_is_shown_as_it_is(evil: str) -> None:
    def one(letter: str) -> Evidence:
        text = f"{letter}{evil}"
        made = evidence(
            workload=f"workload{text}",
            overrides=[f"override{text}"],
            config={f"setting{evil}": f"value{text}"},
            plan={f"knob{evil}": f"planned{text}"},
            metrics={f"metric{text}": 1.0},
            machine={"cpu": f"cpu{text}", "versions": {f"library{evil}": f"version{text}"}},
            started_at=f"when{text}",
        )
        made.record.run_id = f"run{text}"
        entry: Any = {"id": f"finding{text}", "severity": "high", "text": f"said{text}"}
        made.record.findings = [entry]
        return made

    html = comparison_html(Comparison(one("a"), one("b")))
    found = read_page(html)
    assert "\x1b" not in html
    as_shown = evil.replace("\x1b", "\\x1b")
    names = ("workload", "override", "value", "planned", "metric", "cpu", "version", "when", "run", "finding", "said")
    for name in names:
        for letter in "ab":
            assert f"{name}{letter}{as_shown}" in found.text.replace("'\"'\"'", "'"), name
    assert "img" not in found.tags


@pytest.mark.slow
def test_a_browser_shows_both_within_the_width_of_a_phone(chromium: Path, tmp_path: Path, real: Comparison) -> None:
    page = tmp_path / "page.html"
    probe = "document.title=[document.documentElement.scrollWidth,innerWidth].join()"
    page.write_text(with_script(comparison_html(real), probe))
    flags = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}")
    size = ("--window-size=390,900", "--enable-logging=stderr", "--v=0", "--dump-dom")
    done = subprocess.run(
        [chromium, *flags, *size, page.as_uri()], capture_output=True, encoding="utf-8", timeout=60, check=True
    )
    assert "CONSOLE" not in done.stderr
    width, room = Page(done.stdout.partition("</title>")[0].partition("<title>")[2]).text.split(",")
    assert int(width) <= int(room)
    assert done.stdout.count("<canvas") == len(read_page(comparison_html(real)).charts)
