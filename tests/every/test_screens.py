"""docs/screens.md shows whole screens of a run, which the code still prints from the files of that run."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import recording  # noqa: E402
import screens  # noqa: E402

from wellfed.monitor.gpu_cells import CELLS  # noqa: E402
from wellfed.monitor.live_table import BLOCKS  # noqa: E402

SHOWN = recording.recorded(screens.PAGE.read_text(encoding="utf-8"))
TRACES: dict[str, Any] = json.loads(gzip.decompress(screens.TRACE.read_bytes()))


def test_each_size_has_a_screen_of_the_run_of_its_end_and_of_the_monitor() -> None:
    assert set(SHOWN) == {f"{size}_{which}" for size in screens.SIZES for which in ("live", "end", "monitor")}


@pytest.mark.parametrize("name", SHOWN)
def test_a_screen_fits_its_window(name: str) -> None:
    columns, lines = screens.SIZES[name.partition("_")[0]]
    assert max(map(len, SHOWN[name].splitlines())) <= columns
    assert len(SHOWN[name].splitlines()) < lines


@pytest.mark.parametrize("size", screens.SIZES)
def test_the_last_screen_is_what_the_code_prints(size: str, tmp_path: Path) -> None:
    """Else: python tools/screens.py"""
    trace = TRACES[size]
    folder = tmp_path / trace["folder"]
    folder.mkdir(parents=True)
    for name, text in trace["files"].items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "report.html").touch()
    columns, _ = screens.SIZES[size]
    assert recording.last_screen(tmp_path, trace["folder"], columns) == SHOWN[f"{size}_end"].rstrip("\n")


@pytest.mark.parametrize("size", screens.SIZES)
def test_the_live_screen_has_the_start_one_warning_and_the_figures(size: str) -> None:
    lines = SHOWN[f"{size}_live"].splitlines()
    plan = TRACES[size]["files"]["run.json"]
    words = ("recsys", "batch", "loader", "data", "folder")
    starts = [line.split(maxsplit=1)[0] for line in lines if re.match(rf"({'|'.join(words)}) ", line)]
    assert starts == [*words]
    assert json.loads(plan)["memory"]["device"] in lines[0]
    assert sum(" so far: " in line for line in lines) == 1
    assert screens.LIVE.search(SHOWN[f"{size}_live"])
    assert lines[-2].split("  ")[0].endswith("/s")
    assert lines[-1].startswith("GPU ")


@pytest.mark.parametrize("size", screens.SIZES)
def test_the_screen_of_the_monitor_fills_its_window_and_has_each_part(size: str) -> None:
    """Else: python tools/screens.py --monitor"""
    columns, height = screens.SIZES[size]
    lines = SHOWN[f"{size}_monitor"].splitlines()
    assert len(lines) >= height - 3
    assert re.match(r"\d.* of .*\. Curves: utilisation, the last ", lines[0])
    assert lines[1] == "GPU".ljust(5) + "".join(cell.head.rjust(cell.width) for cell in CELLS)
    bars = r" +memory [█░]+ +\d+ % +power [█░]+ +\d+ %$"
    assert [place for place, line in enumerate(lines) if re.match(bars, line)] == [3]
    curves = [line for line in lines if set(line[5:]) & set(BLOCKS) and not line.lstrip().startswith("memory")]
    assert max(map(len, curves)) == columns
    assert sum(line.startswith("host CPU ") for line in lines) == 1
    assert re.match(r"GPU +pid +memory  process", lines[-2])
    assert re.search(r"python src/train\.py loader=auto", lines[-1])


def test_the_readme_shows_a_part_of_the_last_screen() -> None:
    (shown,) = recording.recorded(screens.README.read_text(encoding="utf-8")).values()
    assert shown.rstrip("\n") == screens.in_short(SHOWN["small_end"])


@pytest.mark.parametrize("page", screens.examples())
def test_pages_show_the_figures_of_recorded_runs(page: Path) -> None:
    """Else: python tools/screens.py --monitor"""
    shown = recording.recorded(page.read_text(encoding="utf-8"))
    assert {name: text.rstrip("\n") for name, text in shown.items()} == screens.examples()[page]


def test_no_page_shows_a_folder_of_the_machine() -> None:
    assert not any(re.search(r"(?<![\w.])/(?:home|root|tmp|work|usr)/", text) for text in SHOWN.values())


@pytest.mark.slow
def test_a_run_in_a_real_terminal_still_has_these_lines(cc: Path) -> None:
    folder, live, end = screens.screens(*screens.SIZES["small"])
    shutil.rmtree(ROOT / folder)
    for now, name in ((live, "small_live"), (end, "small_end")):
        shown = re.sub(r"^STARVED.*?(?=^training)", "", SHOWN[name], flags=re.MULTILINE | re.DOTALL)
        words = [line.split()[0] for line in shown.splitlines() if line[:1].isalpha()]
        assert [word for word in words if word not in {line.split()[0] for line in now.splitlines() if line}] == []
    assert len(end.splitlines()) <= 12
