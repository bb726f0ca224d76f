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
from wellfed.observe.loggers.sink import Sink

_LOG = logging.getLogger(__name__)
MOST_TABLE_ROWS = 1000
"""Maximum number of rows of a table that loggers get; further rows are left out."""
_WAY_OUT = "Choose logger=tensorboard, logger=wandb or logger=mlflow."


@dataclass
class _Pass:
    """A pass over data whose code may log."""

    sink: Sink
    step: Callable[[], int]
    process: int = field(default_factory=os.getpid)
    shown: dict[str, int] = field(default_factory=dict)
    """Call, with the name -> latest step at which it was shown."""
    warned: set[str] = field(default_factory=set)
    """Calls with a warning; each has one."""


_current: _Pass | None = None


@contextmanager
def logged_to(sink: Sink | None, step: Callable[[], int] = int) -> Iterator[None]:
    """Sends pictures and tables that the code of the block logs to a sink, at the current ``step``; None drops them."""
    global _current  # noqa: PLW0603  code of a workload has no access to its run
    before, _current = _current, None if sink is None else _Pass(sink, step)
    try:
        yield
    finally:
        _current = before


def log_image(name: str, image: Any, *, every: int = 1) -> None:
    """Shows a picture in all loggers of the current run, at the current step.

    A mistake is one warning and never ends a run. Outside of a run, and on other ranks than 0, nothing happens.

    Args:
        name: such as ``val/confusion``. Of several pictures of one name and step the first is shown.
        image: tensor or array of H x W, H x W x 3 or 3 x H x W; ``uint8``, ``bool``, or floats from 0 to 1, which are
            cut off there. A picture of Pillow, or the path of a picture file.
        every: shows one picture per this many steps. Others are dropped before they are copied.
    """

    def show(sink: Sink, step: int) -> None:
        picture = _picture(image)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / (re.sub(r"[^\w.@-]", "_", name) + f"_{step}.png")
            picture.save(path, compress_level=1)
            sink.file(name, path, step)

    _log(f"log_image({name!r})", every, show)


def log_table(name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, every: int = 1) -> None:
    """Shows a table in all loggers of the current run, at the current step: as a table, or as a text.

    A mistake is one warning and never ends a run. Outside of a run, and on other ranks than 0, nothing happens.

    Args:
        name: as in `log_image`.
        columns: the heads.
        rows: one cell for each column; a tensor or an array of two dimensions, too. 1,000 rows are shown at most.
        every: shows one table per this many steps.
    """

    def show(sink: Sink, step: int) -> None:
        found = rows.tolist() if hasattr(rows, "tolist") else list(rows)
        if widths := {len(row) for row in found} - {len(columns)}:
            raise ValueError(f"a row has {widths.pop()} cells, for {len(columns)} columns")
        sink.table(name, list(map(str, columns)), [list(map(_plain, row)) for row in found[:MOST_TABLE_ROWS]], step)

    _log(f"log_table({name!r})", every, show)


def _log(call: str, every: int, show: Callable[[Sink, int], None]) -> None:
    """Shows a picture or table if it is due. torch.compile leaves this out of its graphs."""
    compiler = sys.modules.get("torch._dynamo")
    (_send if compiler is None else compiler.disable(_send))(call, every, show)


def _send(call: str, every: int, show: Callable[[Sink, int], None]) -> None:
    """Shows a picture or table if it is due. Any error is one warning."""
    run = _current
    if run is None or run.process != os.getpid():  # a worker process has a copy of its parent's run
        return
    problem = ""
    try:
        step = run.step()
        last = run.shown.get(call)
        if last is not None and step // every == last // every:
            return
        run.shown[call] = step
        if run.sink.shows_media:
            show(run.sink, step)
        else:
            call, problem = call.partition("(")[0], f"no logger of this run shows it, so it is dropped. {_WAY_OUT}"
    except Exception as error:  # noqa: BLE001  a picture must not end a run
        package = absent_package(error) if isinstance(error, ModuleNotFoundError) else None
        text = f"can't be shown ({type(error).__name__}: {first_line(error)})."
        problem = " ".join(absence(package)) if package else text
    if problem and call not in run.warned:
        run.warned.add(call)
        _LOG.warning("%s: %s", call, problem)


def _picture(image: Any) -> Any:
    """Returns a picture of Pillow, which raises an error for other types than `log_image` names."""
    import numpy as np
    from PIL import Image
    from torch import Tensor

    if isinstance(image, (str, os.PathLike)):
        with Image.open(image) as picture:
            return picture.convert("RGB")
    is_tensor = isinstance(image, Tensor)
    if is_tensor:
        image = image.detach().cpu()
        image = image.float() if image.is_floating_point() else image  # numpy has no bfloat16
    pixels = np.asarray(image)
    if pixels.ndim == 3 and pixels.shape[0] in (1, 3) and (is_tensor or pixels.shape[2] not in (1, 3)):
        pixels = np.moveaxis(pixels, 0, -1)
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[..., 0]
    if pixels.ndim not in (2, 3):
        raise ValueError(f"the shape is {pixels.shape}, and must be H x W, H x W x 3 or 3 x H x W")
    if pixels.dtype.kind in "fb":
        pixels = (np.nan_to_num(pixels).clip(0, 1) * 255 + 0.5).astype(np.uint8)
    return Image.fromarray(np.ascontiguousarray(pixels))


def _plain(cell: Any) -> Any:
    if getattr(cell, "ndim", None) == 0 and hasattr(cell, "item"):  # a number of torch or numpy
        cell = cell.item()
    return cell if cell is None or isinstance(cell, (bool, int, float, str)) else str(cell)
