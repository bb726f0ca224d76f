"""The figures of docs/tutorial.md are of one recording, agree with each other, and its pictures are of its runs."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.kit.made_run import made_run
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_rules import conclude
from wellfed.explain.report.comparison import compared
from wellfed.explain.report.comparison_page import comparison_html
from wellfed.explain.report.run_page import to_html
from wellfed.units import show_count

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import pictures  # noqa: E402
import recording  # noqa: E402
import tutorial  # noqa: E402

PAGE = tutorial.PAGE.read_text(encoding="utf-8")
BLOCKS = recording.recorded(PAGE)
SHOWN: dict[str, Any] = json.loads(tutorial.RECORD.read_text(encoding="utf-8"))


def test_every_recorded_block_is_there() -> None:
    assert set(BLOCKS) == {"machine", "starved", "typed", "fed", "compared", "tuned"}
    assert BLOCKS["machine"].strip() == SHOWN["machine"]
    assert not any(re.search(r"(?<![\w.])/(?:home|root|tmp|work|usr)/", text) for text in BLOCKS.values())


@pytest.mark.parametrize("run", ["starved", "fed"])
def test_the_screens_show_the_figures_of_the_record(run: str) -> None:
    figures = SHOWN[run]
    assert f" {show_count(figures['samples_per_s'])} pictures/s" in BLOCKS[run]
    assert f"{100 * figures['wait_frac']:.0f} %" in BLOCKS[run]
    assert max(map(len, BLOCKS[run].splitlines())) <= recording.COLUMNS


def test_the_figures_agree_with_each_other() -> None:
    """Else, on an idle machine: python tools/tutorial.py. A page that was recorded on a busy one says so."""
    starved, fed = SHOWN["starved"], SHOWN["fed"]
    assert fed["samples_per_s"] > tutorial.LEAST_GAIN * starved["samples_per_s"]
    is_busy = "busy_machine" in (starved["finding"], fed["finding"])
    assert BLOCKS["machine"].strip().endswith(tutorial.BUSY) is is_busy
    if is_busy:
        return
    assert starved["finding"] == tutorial.CAUSE
    assert fed["samples_per_s"] <= min(starved["ceiling"], fed["ceiling"])


def test_the_command_that_is_typed_is_the_one_that_the_run_named() -> None:
    (named,) = re.findall(r"^ Try.*:\n((?:   .*\n)+)", BLOCKS["starved"], re.MULTILINE)
    words = named.replace("\\\n", " ").split()
    assert BLOCKS["typed"].replace("\\\n", " ").split() == [*words, f"hydra.run.dir={tutorial.FED}"]


def test_no_sentence_has_a_figure_of_the_recording() -> None:
    text = re.sub(r"^```.*?^```", "", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert not re.search(r"\d\.\d+ %|\d times|\d pictures/s", text)


def test_the_pictures_are_there_and_the_pages_still_have_their_headings(tmp_path: Path) -> None:
    for name, size in tutorial.SIZES.items():
        for theme in ("light", "dark"):
            with Image.open(pictures.IMAGES / f"{name}-{theme}.png") as image:
                assert image.size == size[:2]
            assert f"images/{name}-{theme}.png#only-{theme}" in PAGE
    made = []
    for name in "ab":
        (tmp_path / name).mkdir()
        made_run(tmp_path / name, steps=300, run_id=name)
        made.append(Evidence.read(tmp_path / name))
        conclude(made[-1])
    pages = {"tutorial": to_html(made[0], tmp_path / "a"), "compared": comparison_html(*compared(made))}
    for name, headings in SHOWN["headings"].items():
        gone = set(headings[name == "tutorial" :]) - set(pictures.headings(pages[name]))  # the first is the verdict
        assert gone <= {"What the evaluation left", "Metrics"}, name


@pytest.mark.parametrize(
    ("starved", "fed", "tuned", "said"),
    [
        ({}, {}, "beyond noise.", []),
        ({"findings": [{"id": "busy_machine"}]}, {}, "beyond noise.", ["found to be busy_machine"]),
        ({}, {"rate": 150.0}, "beyond noise.", ["1.5 times the rate"]),
        ({"ceiling": {"samples_per_s": 800.0}}, {}, "beyond noise.", ["exceeds the starved run's ceiling"]),
        ({"ceiling": None}, {}, "the start stays.", ["starved run has no ceiling", "nothing beyond the noise"]),
    ],
)
def test_a_recording_that_contradicts_itself_is_refused(
    starved: dict[str, Any], fed: dict[str, Any], tuned: str, said: list[str], tmp_path: Path
) -> None:
    def run(name: str, rate: float, more: dict[str, Any]) -> Any:
        (tmp_path / name).mkdir()
        throughput = {"samples_per_s": more.pop("rate", rate), "ci95": None, "steps": 9, "warmup_steps": 3}
        time = dict.fromkeys(("wait_frac", "compute_frac", "host_frac", "step_ms_p50", "step_ms_p95"), 0.5)
        about = {"throughput": {**throughput, "sample_unit": "pictures"}, "time": time}
        about |= {"ceiling": {"samples_per_s": 1200.0}, "findings": [{"id": tutorial.CAUSE}], **more}
        return made_run(tmp_path / name, **about)

    found = list(tutorial.contradictions(run("a", 100.0, starved), run("b", 1000.0, fed), tuned))
    assert len(found) == len(said)
    assert all(words in line for words, line in zip(said, found, strict=True))
