"""A yaml file that is an option of a group: its name, its lines with a comment a knob, and writing it or none."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from wellfed.config.option_names import in_ascii, is_read_as_value
from wellfed.errors import ConfigError, Fault

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


class Value(NamedTuple):
    """What a knob gets, and why."""

    value: Any
    because: str


def check_name(name: str, flag: str) -> None:
    """Refuse what Hydra or yaml would read as something else than a name.

    Args:
        flag: with which it was typed, e.g. ``--write``.

    Raises:
        ConfigError: with a name that would do.
    """
    if _NAME.fullmatch(name) and not is_read_as_value(name):
        return
    better = f"my_{in_ascii(name) or 'plan'}"
    problem = (
        "becomes the name of a file and an option: letters, digits, '_' and '-', not first a digit, no word of yaml."
    )
    raise ConfigError([Fault(f"{flag} {name}", problem, f"Write {flag} {better}.")])


def comment_lines(text: str) -> list[str]:
    """A heading, each of its lines a comment."""
    return [f"# {line}".rstrip() for line in text.splitlines()]


def yaml_lines(tree: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """A tree whose leaves are `Value`, each with its reason above it."""
    for key, entry in tree.items():
        if isinstance(entry, Value):
            yield f"{indent}# {' '.join(entry.because.split())}"
            in_a_list = yaml.safe_dump([entry.value], default_flow_style=True, width=10**6, sort_keys=False)
            yield f"{indent}{key}: {in_a_list.strip()[1:-1]}"
        else:
            yield f"{indent}{key}:"
            yield from yaml_lines(entry, indent + "  ")


def write_files(texts: Mapping[Path, str], asked: str, way_out: str) -> None:
    """All of them or none: what was there stays until all are written.

    Args:
        asked: what was typed, and ``way_out`` what to do where it can't be done.

    Raises:
        ConfigError: one can't be written; every file is then as it was.
    """
    before: dict[Path, bytes | None] = {}
    at = Path()
    try:
        for at, text in texts.items():
            at.parent.mkdir(exist_ok=True)
            _temporary(at).write_text(text, encoding="utf-8")
        for at in texts:
            content = at.read_bytes() if at.exists() else None
            _temporary(at).replace(at)
            before[at] = content
    except OSError as error:
        for path in texts:
            with contextlib.suppress(OSError):
                _temporary(path).unlink(missing_ok=True)
        for path, old in before.items():
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True) if old is None else path.write_bytes(old)
        problem = f"{at} can't be written: {error.strerror or error}."
        raise ConfigError([Fault(asked, problem, way_out)]) from error


def _temporary(path: Path) -> Path:
    return path.with_suffix(".yaml.tmp")
