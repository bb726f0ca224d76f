"""Reads the JSON file in which the folder of a sweep or a search says what it holds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_type_hints

from wellfed.record import bounded


@contextmanager
def parsed(path: Path, noun: str, schema: int) -> Iterator[Any]:
    """The content of a file; what is made of it within may raise what wrong content raises.

    Raises:
        OSError: there is no such file.
        ValueError: it is not a ``noun``'s, or of another schema.
    """
    try:
        found: Any = bounded(json.loads(path.read_text(encoding="utf-8")))
        if found["schema"] != schema:
            raise ValueError(f"has schema {found['schema']}; this version of wellfed reads schema {schema}")
        yield found
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path} is not the file of a {noun}: {error}.") from error


def check_plain(kind: type, known: Mapping[str, Any]) -> None:
    """Texts and numbers of a file are such. Raises ValueError: one is not."""
    for name, hint in get_type_hints(kind).items():
        value = known.get(name)
        if name in known and hint in (str, int) and (not isinstance(value, hint) or isinstance(value, bool)):
            raise ValueError(f"{name} is {str(value)[:40]!r}")
