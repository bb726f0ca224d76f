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


class _LogFile(logging.FileHandler):
    """Log file that ignores a full disk. The run's tables report it; logging would print a traceback each time."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


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
    handlers: list[tuple[logging.Logger, logging.Handler]] = [(package, terminal)]
    try:
        file = _LogFile(path, encoding="utf-8", errors="backslashreplace")
        file.setFormatter(MaskedFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        handlers.append((root, file))
    except OSError as error:
        print(f"{path} can't be written ({error.strerror}); the log goes to the terminal alone.", file=sys.stderr)
    for logger, handler in handlers:
        logger.addHandler(handler)
    level, root.level = root.level, logging.INFO
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
