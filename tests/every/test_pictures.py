"""The pictures of README and docs show what the code still says of their run, and their captions name that run."""

import io
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageStat

from tests.kit.made_run import made_run
from wellfed.config.compose import compose
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_rules import conclude
from wellfed.explain.report.run_page import to_html

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import pictures  # noqa: E402
import tutorial  # noqa: E402

SHOWN: dict[str, Any] = json.loads(pictures.RECORD.read_text(encoding="utf-8"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
USED = re.compile(rf"images/((?:{'|'.join(pictures.SIZES)})-[\w.-]+)")
"""Pictures of that run; tests/every/test_tutorial.py has the others."""


def shown_now(source: str, scratch: Path) -> dict[str, Any]:
    folder = pictures.folder_of(ROOT / source, scratch)
    evidence = Evidence.read(folder)
    conclude(evidence)
    return pictures.what_is_shown(evidence, to_html(evidence, folder), source)


def test_the_run_of_the_pictures_is_there_or_can_be_typed_and_has_that_verdict(tmp_path: Path) -> None:
    """Else: make pictures."""
    source = SHOWN["from"]
    if source.startswith("python "):
        assert shlex.split(source)[1] == "src/train.py"
        compose(shlex.split(source)[2:])
    else:
        assert shown_now(source, tmp_path) == SHOWN


def test_the_page_still_has_the_headings_of_the_pictures(tmp_path: Path) -> None:
    made_run(tmp_path, steps=300)
    evidence = Evidence.read(tmp_path)
    conclude(evidence)
    page = to_html(evidence, tmp_path)
    now = [heading for heading in SHOWN["headings"] if f"<h2>{heading}" in page]
    of_the_run = {SHOWN["verdict"], "Simulated GPU", "What the evaluation left", "Profile of steps"}
    assert set(SHOWN["headings"]) - set(now) <= of_the_run


def test_the_command_that_makes_the_pictures_can_be_typed() -> None:
    script, *overrides = pictures.COMMAND
    assert (ROOT / script).is_file()
    assert compose(overrides).config.trainer.max_steps == 120


def test_pictures_are_small_and_come_light_and_dark() -> None:
    sizes = [*pictures.SIZES, *pictures.BOARDS, *tutorial.SIZES]
    names = {f"{name}-{theme}.png" for name in sizes for theme in ("light", "dark")}
    records = {pictures.RECORD.name, tutorial.RECORD.name}
    assert {path.name for path in pictures.IMAGES.iterdir()} == {*names, *records}
    side_by_side = {name: (wide * len(shown), high) for name, (wide, high, shown) in pictures.BOARDS.items()}
    for name, size in {**pictures.SIZES, **side_by_side}.items():
        light, dark = (pictures.IMAGES / f"{name}-{theme}.png" for theme in ("light", "dark"))
        grey = {}
        for path in (light, dark):
            assert path.stat().st_size < pictures.MOST_BYTES
            with Image.open(path) as image:
                assert (image.format, image.size) == ("PNG", size[:2])
                grey[path] = ImageStat.Stat(image.convert("L")).mean[0]
        assert grey[light] > 200
        assert grey[dark] < 80


@pytest.mark.parametrize("page", [page for page in PAGES if USED.search(page.read_text(encoding="utf-8"))])
def test_each_caption_names_run_and_machine_of_a_picture_in_both_themes(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    used = set(USED.findall(text))
    assert used == {f"{name.rpartition('-')[0]}-{theme}.png" for name in used for theme in ("light", "dark")}
    caption = " ".join(text[max(found.end() for found in USED.finditer(text)) :][:700].split())
    assert SHOWN["machine"] in caption
    assert f"`{SHOWN['from']}`" in caption
    assert ("of no real card" in caption) is ("Simulated" in SHOWN["machine"])


def test_every_picture_is_used() -> None:
    used = {name for page in PAGES for name in USED.findall(page.read_text(encoding="utf-8"))}
    names = [path.name for name in pictures.SIZES for path in pictures.IMAGES.glob(f"{name}-*.png")]
    assert set(names) == used


def test_the_boards_are_drawn_of_recorded_runs_that_the_caption_names(tmp_path: Path) -> None:
    pages = pictures.boards(tmp_path)
    assert "Sweep quick" in pages["board"]
    assert "Simulated GPU 24 GiB" in pages["board"]
    assert "times as fast as A" in pages["compared"]
    assert pages["compared"].count("NVIDIA H200") >= 2
    text = (ROOT / "docs" / "screens.md").read_text(encoding="utf-8")
    for path in (pictures.SWEEP, *pictures.COMPARED):
        assert f"`{path.relative_to(ROOT).as_posix()}`" in text
    for name in pictures.BOARDS:
        assert all(f"images/{name}-{theme}.png#only-{theme}" in text for theme in ("light", "dark"))


@pytest.mark.slow
def test_a_run_is_drawn_and_a_busy_one_is_not(
    chromium: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pictures, "ROOT", tmp_path)
    monkeypatch.setattr(pictures, "IMAGES", tmp_path / "images")
    monkeypatch.setattr(pictures, "RECORD", tmp_path / "images" / "pictures.json")
    run = tmp_path / "run"
    run.mkdir()
    made_run(run, steps=300, overrides=["workload=recsys", "paths.log_dir=/home/me"], gpus=1)
    assert pictures.main([str(run)]) == 0
    assert len(list((tmp_path / "images").glob("*.png"))) == 2 * len(pictures.SIZES)
    record = json.loads((tmp_path / "images" / "pictures.json").read_text())
    assert (record["from"], record["machine"]) == (
        "python src/train.py workload=recsys",
        "NVIDIA H200, 4 cores of A CPU",
    )
    first = (tmp_path / "images" / "page-light.png").read_bytes()
    with Image.open(io.BytesIO(first)) as image:
        assert len(image.getcolors() or ()) > 20  # not an empty window
    busy = pictures.folder_of(ROOT / "tests/traces/cpu/busy_machine_table.json.gz", tmp_path / "made")
    assert pictures.main([str(busy)]) == 1
    assert "Nothing is drawn. Don't judge this run" in capsys.readouterr().err
    assert (tmp_path / "images" / "page-light.png").read_bytes() == first
