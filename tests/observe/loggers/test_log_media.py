"""`log_image` and `log_table`: what the loggers' own files hold, and what a mistake costs."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from wellfed import log_image, log_table
from wellfed.observe.loggers.lightning_loggers import open_csv
from wellfed.observe.loggers.log_media import MOST_TABLE_ROWS, logged_to
from wellfed.observe.loggers.sink import Sink


class Shown(Sink):
    """Keeps the pixels and tables that it is given; its step is set by hand."""

    shows_media = True

    def __init__(self) -> None:
        super().__init__()
        self.step, self.pictures, self.tables = 0, [], []
        self.pictures: list[tuple[str, int | None, Any]]

    def file(self, name: str, path: Path, step: int | None = None) -> None:
        with Image.open(path) as picture:
            self.pictures.append((name, step, np.asarray(picture)))

    def table(self, name: str, columns: Any, rows: Any, step: int | None = None) -> None:
        self.tables.append((name, list(columns), [list(row) for row in rows], step))


@pytest.fixture
def shown() -> Iterator[Shown]:
    sink = Shown()
    with logged_to(sink, lambda: sink.step):
        yield sink


GREY, COLOURS = np.arange(6, dtype=np.uint8).reshape(2, 3), np.arange(24, dtype=np.uint8).reshape(2, 4, 3)


@pytest.mark.parametrize(
    ("image", "pixels"),
    [
        (GREY, GREY),
        (torch.from_numpy(GREY)[None], GREY),
        (torch.from_numpy(GREY / 255.0).bfloat16().requires_grad_(), GREY),
        (GREY > 2, np.where(GREY > 2, 255, 0)),
        (COLOURS, COLOURS),
        (COLOURS.astype(np.float32) / 255, COLOURS),
        (torch.from_numpy(COLOURS).permute(2, 0, 1), COLOURS),
        (np.moveaxis(COLOURS, 2, 0), COLOURS),
        (Image.fromarray(COLOURS), COLOURS),
        ([[False, True], [True, False]], [[0, 255], [255, 0]]),
    ],
)
def test_pixels_are_shown_as_given(shown: Shown, image: Any, pixels: Any, caplog: pytest.LogCaptureFixture) -> None:
    log_image("a/b", image)
    ((name, step, found),) = shown.pictures
    assert (name, step, caplog.messages) == ("a/b", 0, [])
    assert np.array_equal(found, pixels)


def test_of_one_step_the_first_is_shown_and_every_leaves_steps_out(shown: Shown) -> None:
    for shown.step in (0, 0, 1, 99, 100, 100, 250):
        log_image("each", GREY)
        log_image("seldom", GREY, every=100)
        log_table("each", ["a"], [[shown.step]])
    assert [step for name, step, _ in shown.pictures if name == "each"] == [0, 1, 99, 100, 250]
    assert [step for name, step, _ in shown.pictures if name == "seldom"] == [0, 100, 250]
    assert [step for *_, step in shown.tables] == [0, 1, 99, 100, 250]


def test_a_long_table_is_cut(shown: Shown) -> None:
    log_table("long", ["a"], [[number] for number in range(MOST_TABLE_ROWS + 1)])
    assert [len(rows) for _, _, rows, _ in shown.tables] == [MOST_TABLE_ROWS]


class Untouched(torch.Tensor):
    """Fails if it is copied."""

    def detach(self) -> Any:
        raise AssertionError("copied")


def test_nothing_is_copied_that_no_logger_shows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    image = torch.ones(2, 2).as_subclass(Untouched)
    log_image("outside", image)
    csv = open_csv(tmp_path)
    csv.begin({}, lambda: 1)
    for sink in (Sink(), Sink(csv)):
        caplog.clear()
        with logged_to(sink, lambda: 1), caplog.at_level(logging.WARNING):
            log_image("a", image)
            log_image("b", image)
            with logged_to(None):
                log_table("tried", ["a"], [[1]])
        (line,) = caplog.messages
        assert line.startswith("log_image: no logger of this run shows it, so it is dropped. Choose logger=")
    sink = Shown()
    with logged_to(sink, lambda: 1):
        log_image("a", image)
    assert sink.pictures == []  # the subclass is what fails


def test_a_process_forked_from_the_run_logs_nothing(shown: Shown) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        log_image("a", GREY)
        os.write(writing, bytes([len(shown.pictures)]))
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 1) == b"\0"
    log_image("a", GREY)
    assert len(shown.pictures) == 1


@pytest.mark.slow
def test_a_compiled_loss_logs(shown: Shown) -> None:
    def loss(values: torch.Tensor) -> torch.Tensor:
        doubled = values * 2
        log_image("a", doubled)
        return doubled.sum()

    compiled = torch.compile(loss, backend="eager")
    for shown.step in range(2):
        assert float(compiled(torch.full((2, 2), 0.25))) == 2.0
    assert [(step, picture.tolist()) for _, step, picture in shown.pictures] == [
        (step, [[128, 128], [128, 128]]) for step in range(2)
    ]


def test_a_file_is_shown(shown: Shown, tmp_path: Path) -> None:
    Image.fromarray(COLOURS).save(tmp_path / "a.png")
    log_image("a", tmp_path / "a.png")
    assert np.array_equal(shown.pictures[0][2], COLOURS)


@pytest.mark.parametrize("image", [torch.ones(8, 3, 4, 4), torch.ones(7), torch.ones(2, 2).long(), "absent.png"])
def test_a_mistake_is_one_warning_and_no_picture(shown: Shown, image: Any, caplog: pytest.LogCaptureFixture) -> None:
    for shown.step in range(3):
        log_image("wrong", image)
    (line,) = caplog.messages
    assert line.startswith("log_image('wrong'): can't be shown (")
    assert shown.pictures == []


def test_a_row_of_another_width_is_the_users_mistake(shown: Shown, caplog: pytest.LogCaptureFixture) -> None:
    log_table("wrong", ["a", "b"], [[1, 2], [3]])
    log_table("made", ["a"], ([number] for number in range(2)))  # type: ignore[arg-type]
    (line,) = caplog.messages
    assert "a row has 1 cells, for 2 columns" in line
    assert [cells for _, _, cells, _ in shown.tables] == [[[0], [1]]]


def test_cells_are_plain(shown: Shown) -> None:
    log_table("mixed", ("n", "x", "text", "other"), [[1, 0.5, "a", None], [np.int64(2), torch.tensor(1), 3, [1, 2]]])
    log_table("tensor", ["a", "b"], torch.arange(4).view(2, 2))
    (_, heads, cells, step), (*_, plain, _) = shown.tables
    assert (heads, cells, step) == (["n", "x", "text", "other"], [[1, 0.5, "a", None], [2, 1, 3, "[1, 2]"]], 0)
    assert plain == [[0, 1], [2, 3]]
