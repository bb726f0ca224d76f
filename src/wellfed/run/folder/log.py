"""Writes log messages of a run to its ``train.log``, and warnings to the terminal too."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from wellfed.masking import MaskedFormatter
from wellfed.units import for_stream


class StderrHandler(logging.StreamHandler[TextIO]):
    """Handler that writes to the current ``sys.stderr``, which a progress bar replaces to redraw itself."""

    stream = property(lambda self: sys.stderr, lambda self, stream: None)

    def format(self, record: logging.LogRecord) -> str:
        """Returns the message, broken between words on a terminal."""
        return for_stream(super().format(record), sys.stderr)


@contextmanager
def log_file(path: Path) -> Iterator[None]:
    """Sends log messages and Python's warnings to the file, and this package's warnings to the terminal too."""
    root, package = logging.getLogger(), logging.getLogger("wellfed")
    terminal = StderrHandler()
    terminal.setLevel(logging.WARNING)
    terminal.setFormatter(MaskedFormatter("%(levelname)s: %(message)s"))
    file = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    file.handleError = lambda record: None  # type: ignore[method-assign]  # the tables report a full disk
    file.setFormatter(MaskedFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handlers: list[tuple[logging.Logger, logging.Handler]] = [(package, terminal), (root, file)]
    for logger, handler in handlers:
        logger.addHandler(handler)
    level = root.level
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.setLevel(level)
        for logger, handler in handlers:
            logger.removeHandler(handler)
            with suppress(OSError):  # a full disk
                handler.close()
