"""`log_image` and `log_table`: what the loggers' own files hold, and what a mistake costs."""

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.kit.wandb_files import stored
from wellfed import log_image, log_table
from wellfed.observe.loggers.lightning_loggers import LoggerSink, open_csv
from wellfed.observe.loggers.log_media import MOST_TABLE_ROWS, logged_to, not_logged
from wellfed.observe.loggers.sink import Sink
from wellfed.observe.loggers.wandb_sink import open_run


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
        (GREY[..., None], GREY),
        (torch.from_numpy(GREY)[None], GREY),
        (torch.from_numpy(GREY / 255.0).half(), GREY),
        (torch.from_numpy(GREY / 255.0).bfloat16().requires_grad_(), GREY),
        (GREY > 2, np.where(GREY > 2, 255, 0)),
        (COLOURS, COLOURS),
        (COLOURS.astype(np.float32) / 255, COLOURS),
        (torch.from_numpy(COLOURS).permute(2, 0, 1), COLOURS),
        (torch.from_numpy(COLOURS), COLOURS),
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


def test_a_long_table_is_cut_with_one_warning(shown: Shown, caplog: pytest.LogCaptureFixture) -> None:
    for shown.step in range(2):
        log_table("long", ["a"], [[number] for number in range(MOST_TABLE_ROWS + 1)])
    assert [len(rows) for _, _, rows, _ in shown.tables] == [MOST_TABLE_ROWS] * 2
    assert "1,001 rows; loggers get the first 1,000." in caplog.text
    assert len(caplog.messages) == 1


class Untouched(torch.Tensor):
    """Fails if it is copied."""

    def detach(self) -> Any:
        raise AssertionError("copied")


def test_nothing_is_copied_that_no_logger_shows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    image = torch.ones(2, 2).as_subclass(Untouched)
    log_image("outside", image)
    for sink in (Sink(), Sink(LoggerSink("csv", open_csv(tmp_path), lambda: 1, lambda reason: None))):
        caplog.clear()
        with logged_to(sink, lambda: 1), caplog.at_level(logging.WARNING):
            log_image("a", image)
            log_image("b", image)
            with not_logged():
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


ROWS = [["cat", 1], ["dog", None], ["both", "many"]]


def log_two_steps(sink: Sink) -> None:
    at = iter((5, 5, 7, 7))
    with logged_to(Sink(sink), lambda: next(at)):
        for shade in (0.0, 1.0):
            log_image("val/one", torch.full((3, 4, 4), shade))
            log_table("counts", ["class", "count"], ROWS)


def test_wandb_has_both_at_their_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    lost: list[str] = []
    named: dict[str, Any] = {"project": "p", "entity": None, "group": None, "name": "r", "run_id": None, "config": {}}
    sink = open_run(tmp_path, mode="offline", **named, on_lost=lost.append)
    log_two_steps(sink)
    folder = sink.folder
    sink.finish({}, 0)
    assert lost == []
    rows = [row for row in stored(folder).history if "step" in row]
    names = [{key.partition(".")[0] for key in row} - {"step"} for row in rows]
    assert [(row["step"], *found) for row, found in zip(rows, names, strict=True)] == [
        (5, "val/one"),
        (5, "counts"),
        (7, "val/one"),
        (7, "counts"),
    ]
    pictures = sorted((folder / "files" / "media" / "images" / "val").glob("one_*.png"), key=os.path.getmtime)
    shades = []
    for path in pictures:
        with Image.open(path) as picture:
            shades.append(np.asarray(picture).max())
    assert sorted(shades) == [0, 255]
    tables = [json.loads(path.read_text()) for path in (folder / "files" / "media" / "table").glob("counts_*.json")]
    assert [(one["columns"], one["data"]) for one in tables] == [(["class", "count"], ROWS)] * 2


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


def test_values_outside_of_a_picture_are_cut_off(shown: Shown) -> None:
    log_image("a", torch.tensor([[float("nan"), 2.0, 0.5], [-1.0, float("inf"), 1.0]]))
    assert shown.pictures[0][2].tolist() == [[0, 255, 128], [0, 255, 255]]


def test_cells_are_plain(shown: Shown, caplog: pytest.LogCaptureFixture) -> None:
    log_table("mixed", ("n", "x", "text", "other"), [[1, 0.5, "a", None], [np.int64(2), torch.tensor(1), 3, [1, 2]]])
    log_table("tensor", ["a", "b"], torch.arange(4).view(2, 2))
    (_, heads, cells, step), (*_, plain, _) = shown.tables
    assert (heads, cells, step) == (["n", "x", "text", "other"], [[1, 0.5, "a", None], [2, 1, 3, "[1, 2]"]], 0)
    assert plain == [[0, 1], [2, 3]]
    log_table("wrong", ["a", "b"], [[1, 2], [3]])
    assert "row 1 has 1 cells for 2 columns" in caplog.text
    assert len(shown.tables) == 2
