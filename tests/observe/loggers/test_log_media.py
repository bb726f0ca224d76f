"""`log_image` and `log_table`: what the loggers' own files hold, and what a mistake costs."""

import json
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.kit.tables import rows_of
from tests.kit.wandb_files import stored
from wellfed import log_image, log_table
from wellfed.observe.loggers.lightning_loggers import LoggerSink, open_csv, open_mlflow, open_tensorboard
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
        (COLOURS[:, :3].repeat(2, 0)[:3], COLOURS[:, :3].repeat(2, 0)[:3]),  # 3 x 3 x 3: channels last in an array
        (torch.from_numpy(COLOURS[:, :3].repeat(2, 0)[:3]).permute(2, 0, 1), COLOURS[:, :3].repeat(2, 0)[:3]),
        (Image.fromarray(COLOURS), COLOURS),
        ([[False, True], [True, False]], [[0, 255], [255, 0]]),
    ],
)
def test_pixels_are_shown_as_given(shown: Shown, image: Any, pixels: Any, caplog: pytest.LogCaptureFixture) -> None:
    log_image("a/b", image)
    ((name, step, found),) = shown.pictures
    assert (name, step, caplog.messages) == ("a/b", 0, [])
    assert np.array_equal(found, pixels)


def test_a_file_is_shown(shown: Shown, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Image.fromarray(COLOURS).save(tmp_path / "a.png")
    log_image("a", tmp_path / "a.png")
    log_image("b", str(tmp_path / "a.png"))
    assert [np.array_equal(picture, COLOURS) for *_, picture in shown.pictures] == [True, True]
    (tmp_path / "broken.png").write_text("no picture")
    for path in ("broken.png", "absent.png", "a.txt"):
        log_image("c", tmp_path / path)
        log_image(path, tmp_path / path)
    assert len(shown.pictures) == 2
    assert len(caplog.messages) == 6
    for number, reason in enumerate(["cannot identify image file", "there is no file", "Save it as PNG"]):
        assert all(reason in message for message in caplog.messages[2 * number : 2 * number + 2])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((torch.ones(8, 3, 4, 4),), "the shape is (8, 3, 4, 4), and must be H x W, H x W x 3 or 3 x H x W. Take one"),
        ((torch.ones(7),), "the shape is (7,), and must be"),
        ((torch.ones(0, 3),), "the shape is (0, 3), and must be"),
        ((torch.ones(5, 4, 5),), "the shape is (5, 4, 5), and must be"),
        ((torch.ones(2, 2).long(),), "the dtype is int64, and must be uint8, bool, or floats from 0 to 1. Write"),
        (("absent.png",), "there is no file absent.png"),
        ((object(),), "the shape is (), and must be"),
    ],
)
def test_a_mistake_is_one_warning_and_no_picture(
    shown: Shown, given: tuple[Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    for shown.step in range(3):
        log_image("wrong", *given)
    (line,) = caplog.messages
    assert line.startswith("log_image('wrong'): ")
    assert message in line
    assert shown.pictures == []


def test_each_mistake_of_a_call_is_told_once(shown: Shown, caplog: pytest.LogCaptureFixture) -> None:
    for shown.step in range(2):
        log_image("a", torch.ones(7))
        log_image("a", torch.ones(2, 2).long())
        log_image("a", torch.tensor([[2.0, 0.5 * shown.step]]))
        log_table("a", ["a"], [[1, 2]] * (1 + shown.step))
        log_table("a", [], [])
    mistakes = ["the shape is", "the dtype is", "1 of 2 values are not", "row 0 has", "columns=[], and must"]
    assert len(caplog.messages) == len(mistakes)
    assert all(mistake in message for mistake, message in zip(mistakes, caplog.messages, strict=True))


def test_a_mistake_leaves_the_turn_to_the_next(shown: Shown) -> None:
    for shown.step in range(3):
        log_image("seldom", GREY.astype(int) if shown.step == 0 else GREY, every=100)
        log_table("seldom", ["a"], 7 if shown.step == 0 else [[shown.step]], every=100)
    assert [step for _, step, _ in shown.pictures] == [1]
    assert [step for *_, step in shown.tables] == [1]


def test_values_that_are_none_of_a_picture_are_cut_off_and_counted(
    shown: Shown, caplog: pytest.LogCaptureFixture
) -> None:
    log_image("a", torch.tensor([[float("nan"), 2.0, 0.5], [-1.0, float("inf"), 1.0]]))
    assert shown.pictures[0][2].tolist() == [[0, 255, 128], [0, 255, 255]]
    (line,) = caplog.messages
    assert "4 of 6 values are not from 0 to 1" in line


@pytest.mark.parametrize(
    "name", ["", " a", "a//b", "../a", "a/..", "a\nb", "a:b", "/a", "a" * 121, 3, None, "findings"]
)
def test_a_name_that_is_none_is_refused(shown: Shown, name: Any, caplog: pytest.LogCaptureFixture) -> None:
    log_image(name, GREY)
    log_table(name, ["a"], [[1]])
    assert (shown.pictures, shown.tables, len(caplog.messages)) == ([], [], 2)


def test_of_one_step_the_first_is_shown_and_every_leaves_steps_out(shown: Shown) -> None:
    for shown.step in (0, 0, 1, 99, 100, 100, 250):
        log_image("each", GREY)
        log_image("seldom", GREY, every=100)
        log_table("each", ["a"], [[shown.step]])
    assert [step for name, step, _ in shown.pictures if name == "each"] == [0, 1, 99, 100, 250]
    assert [step for name, step, _ in shown.pictures if name == "seldom"] == [0, 100, 250]
    assert [step for *_, step in shown.tables] == [0, 1, 99, 100, 250]


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "10"])
def test_a_distance_that_is_none_is_refused(shown: Shown, every: Any, caplog: pytest.LogCaptureFixture) -> None:
    log_image("a", GREY, every=every)
    assert shown.pictures == []
    assert f"every={every!r}, and must be a whole number of steps" in caplog.text


def test_cells_are_plain_and_a_column_has_one_kind(shown: Shown) -> None:
    rows = [[1, 0.5, "a", None], [np.int64(2), torch.tensor(1), 3, [1, 2]]]
    log_table("mixed", ("n", "x", "text", "other"), rows)
    log_table("tensor", ["a", "b"], torch.arange(4).view(2, 2))
    (_, heads, cells, step), (*_, plain, _) = shown.tables
    assert (heads, cells, step) == (["n", "x", "text", "other"], [[1, 0.5, "a", None], [2, 1, "3", "[1, 2]"]], 0)
    assert plain == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("columns", "rows", "message"),
    [
        (["a", "b"], [[1, 2], [3]], "row 1 has 1 cells for 2 columns, [3]. Each row needs"),
        (["a", "b"], [[1, 2, 3]], "row 0 has 3 cells for 2 columns"),
        (["a", "b"], ["ab"], "row 0 has 1 cells for 2 columns, ['ab']"),
        (["a", "b"], [5], "row 0 has 1 cells for 2 columns, [5]"),
        ([], [], "columns=[], and must be a list of names"),
        ("ab", [[1, 2]], "columns='ab', and must be a list of names"),
        (["a"], 7, "can't be shown (TypeError"),
    ],
)
def test_a_table_that_is_none_is_one_warning(
    shown: Shown, columns: Any, rows: Any, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    for shown.step in range(2):
        log_table("wrong", columns, rows)
    (line,) = caplog.messages
    assert message in line
    assert shown.tables == []


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


def log_two_steps(sink: Sink) -> None:
    at = iter((5, 5, 7, 7))
    with logged_to(Sink(sink), lambda: next(at)):
        for shade in (0.0, 1.0):
            log_image("val/one", torch.full((3, 4, 4), shade))
            log_table("counts", ["class", "count"], [["cat", 1], ["dog", None]])


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
    assert [(one["columns"], one["data"]) for one in tables] == [(["class", "count"], [["cat", 1], ["dog", None]])] * 2


@pytest.mark.guests
@pytest.mark.filterwarnings("ignore")
def test_tensorboard_has_both_at_their_steps(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    lost: list[str] = []
    logger = open_tensorboard(tmp_path, resumed_at=None)
    logger.begin({}, is_new=True)
    sink = LoggerSink("tensorboard", logger, lambda: 999, lost.append)
    log_two_steps(sink)
    sink.finish({}, 0)
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(event.step, event.width, event.height) for event in found.Images("val/one")] == [(5, 4, 4), (7, 4, 4)]
    assert [event.step for event in found.Tensors("counts/text_summary")] == [5, 7]
    assert b"| cat | 1 |" in found.Tensors("counts/text_summary")[0].tensor_proto.string_val[0]
    assert lost == []


@pytest.mark.guests
@pytest.mark.filterwarnings("ignore")
def test_mlflow_has_a_file_for_each_step(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow.tracking import MlflowClient

    lost: list[str] = []
    logger = open_mlflow(f"file:{tmp_path / 'store'}", experiment="wellfed", name="first", run_id=None)
    logger.begin({}, is_new=True)
    sink = LoggerSink("mlflow", logger, lambda: 999, lost.append)
    log_two_steps(sink)
    sink.finish({}, 0)
    kept = Path(MlflowClient(f"file:{tmp_path / 'store'}").get_run(logger.run_id).info.artifact_uri[len("file:") :])
    names = ["counts_5.md", "counts_7.md", "val_one_5.png", "val_one_7.png"]
    assert sorted(path.name for path in kept.iterdir()) == names
    assert lost == []


def test_a_csv_logger_keeps_its_figures(tmp_path: Path) -> None:
    logger = open_csv(tmp_path)
    logger.begin({}, is_new=True)
    sink = LoggerSink("csv", logger, lambda: 1, lambda reason: None)
    log_two_steps(sink)
    sink.log({"step": 1, "train/loss": 0.5})
    sink.finish({}, 0)
    assert [row["train/loss"] for row in rows_of(tmp_path / "csv" / "version_0" / "metrics.csv")][:1] == ["0.5"]
