"""Reads the JSON file in which the folder of a sweep or a search says what it holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def parsed(path: Path, noun: str, schema: int) -> Iterator[Any]:
    """The content of a file; what is made of it within may raise what wrong content raises.

    Raises:
        OSError: there is no such file.
        ValueError: it is not a ``noun``'s, or of another schema.
    """
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
        if found["schema"] != schema:
            raise ValueError(f"has schema {found['schema']}; this version of wellfed reads schema {schema}")
        yield found
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not the file of a {noun}: {error}.") from error
