"""Names and writes yaml files that are options of a group, with a comment for each knob."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from wellfed.errors import ConfigError
from wellfed.record.files import write_atomically
from wellfed.units import show_text

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_READ_AS_VALUES = {"on", "off", "yes", "no", "true", "false", "null", "y", "n", "nan", "inf"}


class Value(NamedTuple):
    """A knob's value and the reason for it."""

    value: Any
    because: str


def is_read_as_value(name: str) -> bool:
    """Returns whether yaml or Hydra reads the name as a number, boolean or null."""
    return name.lower() in _READ_AS_VALUES


def in_ascii(text: str) -> str:
    """Returns the letters and digits of a text in ASCII, joined by '_'; accents are dropped."""
    letters = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[\W_]+", "_", letters).strip("_")


def check_name(name: str, flag: str) -> None:
    """Refuses names that Hydra or yaml would read as something else; ``flag`` is ``--name`` or ``tune.name=``."""
    if not _NAME.fullmatch(name) or is_read_as_value(name):
        problem = "becomes the name of a file: letters, digits, '_' and '-', not first a digit, no word of yaml."
        way_out = f"Write {typed(flag, 'my_' + (in_ascii(name) or 'plan'))}."
        raise ConfigError.of(typed(flag, name), problem, way_out)


def typed(flag: str, name: str) -> str:
    """Returns a flag with its value, e.g. ``--name mine`` or ``tune.name=mine``."""
    return f"{flag}{name}" if flag.endswith("=") else f"{flag} {name}"


def comment_lines(text: str) -> list[str]:
    """Returns the lines of a heading as comments."""
    return [f"# {line}".rstrip() for line in show_text(text).splitlines()]


def yaml_lines(tree: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Yields the lines of a tree of `Value` leaves, each with its reason above it."""
    for key, entry in tree.items():
        if isinstance(entry, Value):
            yield f"{indent}# {' '.join(show_text(entry.because).split())}"
            in_a_list = yaml.safe_dump([entry.value], default_flow_style=True, width=10**6, sort_keys=False)
            yield f"{indent}{key}: {in_a_list.strip()[1:-1]}"
        else:
            yield f"{indent}{key}:"
            yield from yaml_lines(entry, indent + "  ")


def write_files(texts: Mapping[Path, str], asked: str, *, replaces: bool = False) -> None:
    """Writes each file as a whole, in order; none if one is there already, unless ``replaces``.

    Raises:
        ConfigError: a file can't be written, or is there; the message names ``asked``.
    """
    if there := [str(path) for path in texts if path.exists() and not replaces]:
        raise ConfigError.of(asked, f"{' and '.join(there)}: there already.", "Take another name.")
    for path, text in texts.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text)
        except OSError as error:
            way_out = "Free space, or make its folder writable."
            raise ConfigError.of(asked, f"{path} can't be written: {error.strerror or error}.", way_out) from error
