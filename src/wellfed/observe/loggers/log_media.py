"""Logs pictures and tables from a workload's own code, while a run lasts: `log_image` and `log_table`."""

from __future__ import annotations

import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wellfed.errors import first_line
from wellfed.extras import absence, absent_package
from wellfed.observe.loggers.sink import PICTURES, Sink

_LOG = logging.getLogger(__name__)
MOST_TABLE_ROWS = 1000
"""Maximum number of rows of a table that loggers get."""
_NAME = re.compile(r"(?!.*(?:^|/)\.{1,2}(?:/|$))[\w.@-][\w.@ -]*(?:/[\w.@-][\w.@ -]*)*")
_LONGEST_NAME = 120
_OF_RUNS = frozenset(("findings", "report", "step", "epoch"))
"""Names under which each run logs something itself."""
_CHANNELS = (1, 3)


@dataclass
class _Pass:
    """A pass over data whose code may log."""

    sink: Sink
    step: Callable[[], int]
    process: int = field(default_factory=os.getpid)
    shown: dict[tuple[str, str], int] = field(default_factory=dict)
    """(kind, name) -> latest step at which it was shown."""
    warned: set[tuple[str, str]] = field(default_factory=set)
    """(call, mistake)."""

    def warn(self, call: str, mistake: str, text: str) -> None:
        """Logs a warning, once for each call and kind of mistake, since the text may differ at each step."""
        if (call, mistake) not in self.warned:
            self.warned.add((call, mistake))
            _LOG.warning("%s %s", call, text)


_current: _Pass | None = None


class _Refused(ValueError):
    """A picture or table that can't be shown, with its value, the rule and the way out. ``mistake`` is its kind."""

    def __init__(self, mistake: str, text: str) -> None:
        super().__init__(text)
        self.mistake = mistake


@contextmanager
def logged_to(sink: Sink, step: Callable[[], int]) -> Iterator[None]:
    """Sends pictures and tables that the code of the block logs to a sink, at the current ``step``."""
    with _as_current(_Pass(sink, step)):
        yield


@contextmanager
def not_logged() -> Iterator[None]:
    """Drops pictures and tables of the block, which only tries batches."""
    with _as_current(None):
        yield


@contextmanager
def _as_current(wanted: _Pass | None) -> Iterator[None]:
    global _current  # noqa: PLW0603  code of a workload has no access to its run
    before, _current = _current, wanted
    try:
        yield
    finally:
        _current = before


def log_image(name: str, image: Any, *, every: int = 1) -> None:
    """Shows a picture in all loggers of the current run, at the current step.

    A mistake is one warning and never ends a run. Outside of a run, and on other ranks than 0, nothing happens.

    Args:
        name: such as ``val/confusion``. Of several pictures of one name and step the first is shown.
        image: tensor or array of H x W, H x W x 3 or 3 x H x W; ``uint8``, ``bool``, or floats from 0 to 1. A picture
            of Pillow, or the path of a PNG or JPEG file.
        every: shows one picture per this many steps. Others are dropped before they are copied.
    """

    def show(run: _Pass, step: int) -> None:
        pixels = _pixels(image, lambda text: run.warn(f"log_image({name!r}):", "values", text))
        from PIL import Image

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{name.replace('/', '_')}_{step}.png"
            Image.fromarray(pixels).save(path, compress_level=1)
            run.sink.file(name, path, step)

    _log("image", name, every, show)


def log_table(name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, every: int = 1) -> None:
    """Shows a table in all loggers of the current run, at the current step: as a table, or as a text.

    A mistake is one warning and never ends a run. Outside of a run, and on other ranks than 0, nothing happens.

    Args:
        name: as in `log_image`.
        columns: the heads.
        rows: one cell for each column; a tensor or an array of two dimensions, too. 1,000 rows are shown at most.
        every: shows one table per this many steps.
    """

    def show(run: _Pass, step: int) -> None:
        heads, cells = list(map(str, columns)), _cells(columns, rows)
        if len(cells) > MOST_TABLE_ROWS:
            text = f"{len(cells):,} rows; loggers get the first {MOST_TABLE_ROWS:,}."
            run.warn(f"log_table({name!r}):", "length", text)
        run.sink.table(name, heads, _of_one_kind(cells[:MOST_TABLE_ROWS]), step)

    _log("table", name, every, show)


def _log(kind: str, name: str, every: int, show: Callable[[_Pass, int], None]) -> None:
    """Shows a picture or table if it is due. torch.compile leaves this out of its graphs."""
    compiler = sys.modules.get("torch._dynamo")
    (_send if compiler is None else compiler.disable(_send))(kind, name, every, show)


def _send(kind: str, name: str, every: int, show: Callable[[_Pass, int], None]) -> None:
    """Shows a picture or table if it is due. Any error is one warning."""
    run = _current
    if run is None or run.process != os.getpid():  # a worker process has a copy of its parent's run
        return
    call = f"log_{kind}({name!r}):"
    try:
        _check(name, every)
        step = run.step()
        last = run.shown.get((kind, name))
        if last is not None and step // every == last // every:
            return
        if run.sink.shows_media:
            show(run, step)
        else:
            way_out = "Choose logger=tensorboard, logger=wandb or logger=mlflow."
            run.warn(f"log_{kind}:", "logger", f"no logger of this run shows it, so it is dropped. {way_out}")
        run.shown[kind, name] = step
    except _Refused as error:  # the next one of these steps may be right
        run.warn(call, error.mistake, f"{error} The {kind} is dropped.")
    except Exception as error:  # noqa: BLE001  a picture must not end a run
        if isinstance(error, ModuleNotFoundError):
            run.shown[kind, name] = step  # no later one of these steps can be shown either
        package = absent_package(error) if isinstance(error, ModuleNotFoundError) else None
        text = f"can't be shown ({type(error).__name__}: {first_line(error)})."
        run.warn(call, type(error).__name__, " ".join(absence(package)) if package else text)


def _check(name: Any, every: Any) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
        raise _Refused(
            "name",
            f"the name is {name!r:.150}, and must be words of letters, digits, '_', '-', '.' and spaces, "
            f"joined by '/', with at most {_LONGEST_NAME} characters. Write for instance 'val/confusion'.",
        )
    if name in _OF_RUNS:
        raise _Refused("own name", f"each run logs {name!r} itself. Choose another name, such as 'val/{name}'.")
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise _Refused("every", f"every={every!r}, and must be a whole number of steps, 1 or more. Write every=100.")


def _pixels(image: Any, warn: Callable[[str], None]) -> Any:
    """Returns a picture as an array of uint8, H x W or H x W x 3. The shape is checked before anything is copied."""
    import numpy as np
    from torch import Tensor

    if isinstance(image, (str, os.PathLike)):
        return np.asarray(_read(Path(image)))
    is_tensor = isinstance(image, Tensor)
    found: Any = image if is_tensor else np.asarray(image)
    shape = tuple(found.shape)
    channels_at = _channels_at(shape, first_wins=is_tensor)
    text = str(found.dtype).removeprefix("torch.")
    is_float = "float" in text
    if not is_float and text not in ("uint8", "bool"):
        raise _Refused(
            "dtype", f"the dtype is {text}, and must be uint8, bool, or floats from 0 to 1. Write .to(torch.uint8)."
        )
    if is_tensor:
        found = found.detach().cpu()
        found = (found.float() if is_float else found).numpy()
    if channels_at is not None:
        found = np.moveaxis(found, channels_at, -1)
        found = found[..., 0] if found.shape[-1] == 1 else found
    if is_float:
        found = found.astype(np.float32)
        if strange := int((~((found >= 0) & (found <= 1))).sum()):  # NaN is neither
            warn(
                f"{strange:,} of {found.size:,} values are not from 0 to 1; NaN is shown as 0, others are cut off. "
                "Scale them before: (x - x.min()) / (x.max() - x.min())."
            )
        found = np.nan_to_num(found, nan=0.0, posinf=1.0, neginf=0.0).clip(0, 1) * 255 + 0.5
    elif text == "bool":
        found = found * 255
    return np.ascontiguousarray(found.astype(np.uint8))


def _channels_at(shape: tuple[int, ...], *, first_wins: bool) -> int | None:
    """Returns the dimension of the channels; None for a picture of two dimensions."""
    if len(shape) == 2 and 0 not in shape:
        return None
    if len(shape) == 3 and 0 not in shape:
        for place in (0, 2) if first_wins else (2, 0):
            if shape[place] in _CHANNELS:
                return place
    way_out = "Take one of the batch: image[0]." if len(shape) == 4 else "Check its dimensions."
    raise _Refused("shape", f"the shape is {shape}, and must be H x W, H x W x 3 or 3 x H x W. {way_out}")


def _read(path: Path) -> Any:
    if path.suffix.lower() not in PICTURES:
        raise _Refused("suffix", f"{path} must be a file of {', '.join(sorted(PICTURES))}. Save it as PNG.")
    if not path.is_file():
        raise _Refused("file", f"there is no file {path}. Write it first, or give its whole path.")
    from PIL import Image

    with Image.open(path) as picture:
        return picture.convert("RGB")


def _cells(columns: Any, rows: Any) -> list[list[Any]]:
    """Returns the rows with plain numbers and texts."""
    if isinstance(columns, str) or not len(columns):
        raise _Refused(
            "columns", f"columns={columns!r}, and must be a list of names, at least one. Write ['class', 'count']."
        )
    if hasattr(rows, "tolist"):
        rows = rows.tolist()
    found = [[row] if isinstance(row, str) or not hasattr(row, "__iter__") else list(row) for row in rows]
    for number, row in enumerate(found):
        if len(row) != len(columns):
            raise _Refused(
                "cells",
                f"row {number} has {len(row)} cells for {len(columns)} columns, {row!r:.80}. Each row needs as many "
                "cells as there are columns; None leaves one empty.",
            )
    return [[_plain(cell) for cell in row] for row in found]


def _plain(cell: Any) -> Any:
    if getattr(cell, "ndim", None) == 0 and hasattr(cell, "item"):  # a number of torch or numpy
        cell = cell.item()
    return cell if cell is None or isinstance(cell, (bool, int, float, str)) else str(cell)


def _of_one_kind(rows: list[list[Any]]) -> list[list[Any]]:
    """Returns the rows with texts in each column of several kinds, which wandb refuses."""
    kinds = [
        {float if type(cell) is int else type(cell) for cell in cells if cell is not None}
        for cells in zip(*rows, strict=True)
    ]
    return [
        [cell if cell is None or len(kind) < 2 else str(cell) for cell, kind in zip(row, kinds, strict=True)]
        for row in rows
    ]
