"""Ranks stand beside each other, whether two or many, with the parts of their steps."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.kit.made_run import made_run
from tests.kit.page_reader import read_page
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_rules import conclude
from wellfed.explain.report.pictures.machine_pictures import ranks_side_by_side
from wellfed.explain.report.run_lines import MOST_GPUS
from wellfed.explain.report.run_page import to_html
from wellfed.record.entries import RunRecord


def rank(number: int, wait_frac: float, **more: Any) -> Any:
    shares = {"wait_frac": wait_frac, "copy_frac": 0.05, "compute_frac": 0.9 - wait_frac, "host_frac": 0.05}
    about = {"rank": number, "node": number // 8, "gpu": None, "step_ms_mean": 100.0, "readiness_frac": 1 - wait_frac}
    return {**about, **shares, "peak_gib": 1.5, **more}


def drawn(ranks: list[Any]) -> tuple[list[str], str]:
    """Texts of the rows, and the caption."""
    (picture,) = ranks_side_by_side(Evidence(RunRecord("r", ranks=ranks)))
    return re.findall(r"<span>(.*?)</span>", str(picture.image)), picture.caption


def test_two_ranks_have_parts_readiness_and_memory() -> None:
    (picture,) = ranks_side_by_side(Evidence(RunRecord("r", ranks=[rank(0, 0.1, gpu="0"), rank(1, 0.4, gpu="1")])))
    texts, _ = drawn([rank(0, 0.1, gpu="0"), rank(1, 0.4, gpu="1", peak_gib=None)])
    assert texts == ["rank 0, GPU 0", "100 ms, ready 90 %, 1.50 GiB", "rank 1, GPU 1", "100 ms, ready 60 %"]
    widths = re.findall(r'<i class=(\w+) style="width:([\d.]+)%" title="(\w+) ([^"]*)"', str(picture.image))
    assert widths[4:] == [
        ("one", "40", "wait", "40 ms"),
        ("two", "5", "copy", "5 ms"),
        ("three", "50", "compute", "50 ms"),
        ("four", "5", "host", "5 ms"),
    ]
    assert [key.text for key in picture.more_keys] == ["wait", "copy", "compute", "host"]


def test_of_64_ranks_those_that_wait_longest_are_drawn() -> None:
    texts, caption = drawn([rank(number, number / 100) for number in range(64)])
    assert texts[::2] == [f"rank {number}, node {number // 8}" for number in range(63, 63 - MOST_GPUS, -1)]
    assert caption.startswith(f"The {MOST_GPUS} of 64 ranks that waited longest; run.json has all.")


def test_one_rank_has_no_picture_and_the_page_of_64_is_whole(tmp_path: Path) -> None:
    assert list(ranks_side_by_side(Evidence(RunRecord("r", ranks=[rank(0, 0.5)])))) == []
    made_run(tmp_path, steps=100, gpus=2, ranks=[rank(number, number / 100, copy_frac=None) for number in range(64)])
    evidence = Evidence.read(tmp_path)
    conclude(evidence)
    page = read_page(to_html(evidence, tmp_path))
    assert "Ranks side by side" in page.text
    assert "64 ranks wait for data between 0.0 % (rank 0) and 63.0 % (rank 63) of their steps' time" in page.text
