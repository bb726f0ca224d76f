"""Memory against budget and prediction: over time where it was watched, as bars where it was not."""

from pathlib import Path
from typing import Any

from tests.kit.made_run import made_run
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.pages.chart import PagePicture
from wellfed.explain.report.pictures.machine_pictures import memory
from wellfed.explain.report.pictures.picture_parts import TimeAxis


def drawn(folder: Path, **made: Any) -> list[PagePicture]:
    made_run(folder, metrics={}, **made)
    evidence = Evidence.read(folder)
    return list(memory(evidence, TimeAxis.of(evidence)))


def keys(picture: PagePicture) -> list[str]:
    return [key.text for key in picture.charts[0].keys]


LIMITS = ["budget, 7.20 GiB", "predicted peak, 5.00 GiB", "measured peak, 5.50 GiB"]


def test_a_few_cards_have_a_colour_each_and_of_many_the_fullest_are_drawn(tmp_path: Path) -> None:
    for gpus in (2, 20):
        folder = tmp_path / str(gpus)
        folder.mkdir()
        (picture,) = drawn(folder, gpus=gpus)
        *cards, budget, predicted, measured = keys(picture)
        assert [budget, predicted, measured] == LIMITS
        assert len(cards) == min(4, gpus)
        assert picture.caption.startswith("The 4 of 20 GPUs that were fullest." if gpus == 20 else "Of all processes")


def test_on_a_cpu_it_is_the_process_s(tmp_path: Path) -> None:
    (picture,) = drawn(tmp_path, gpus=0)
    assert keys(picture) == ["this process and its workers"]


def test_of_nothing_there_is_none(tmp_path: Path) -> None:
    assert drawn(tmp_path, has_telemetry=False) == []
