"""Makes options of what a measured run had: whole groups of knobs as yaml, each with its reason.

An overlay of single knobs would survive a later ``loader=balanced`` on the command line, half of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from wellfed.config.files.option_file import Value, check_name, comment_lines, typed, yaml_lines
from wellfed.config.schema import LoaderConfig, MemoryConfig
from wellfed.errors import ConfigError
from wellfed.study.points.grid import OF_THE_SWEEP, group_of
from wellfed.study.ranking.winner import AS_CONFIGURED, recorded_knobs

_SCHEMAS: Mapping[str, type] = {"loader": LoaderConfig, "memory": MemoryConfig}
OF_THE_DATA = ("loader.skip_ids", "loader.max_skipped", "loader.shuffle_buffer")
"""Knobs about which samples come, and in which order: they are not written."""
_SHIPPED = {
    "loader": ("auto", "baseline", "conservative", "balanced", "aggressive", "own"),
    "memory": ("auto", "cache", "cache_host", "dynamic", "accumulate", "tight"),
}


def free_paths(
    name: str,
    groups: Sequence[str],
    config_dir: Path,
    *,
    flag: str,
    may_replace: Callable[[Path], bool],
    way_out: str = "Add --force, or take another name.",
) -> dict[str, Path]:
    """Returns group -> file of an option of that name.

    Args:
        flag: flag with which the name is typed.
        may_replace: returns whether an existing file may be replaced.
        way_out: advice where it may not.

    Raises:
        ConfigError: the name is unusable, or files are there already.
    """
    check_name(name, flag)
    paths = {group: config_dir / group / f"{name}.yaml" for group in groups}
    asked = typed(flag, name)
    if shipped := [group for group in groups if name in _SHIPPED[group]]:
        problem = f"is an option of {' and '.join(shipped)} that others rely on; it is not replaced."
        raise ConfigError.of(asked, problem, f"Write {typed(flag, f'my_{name}')}.")
    if there := [str(path) for path in paths.values() if path.exists() and not may_replace(path)]:
        raise ConfigError.of(asked, f"{' and '.join(there)}: there already.", way_out)
    return paths


def option_values(group: str, record: Mapping[str, Any]) -> dict[str, Value]:
    """Returns the knobs of an option as a run had them: by its plan where that decided them, else as configured."""
    knobs = [each.name for each in fields(_SCHEMAS[group]) if f"{group}.{each.name}" not in OF_THE_DATA]
    values = {knob: Value(value, because) for knob, (value, because) in recorded_knobs(record, group, knobs).items()}
    if group == "memory":
        values["accumulate"] = Value(None, "follows from micro_batch")
    return values


def option_text(group: str, record: Mapping[str, Any], heading: str, because: Mapping[str, str] | None = None) -> str:
    """Returns the whole file.

    Args:
        heading: first lines, which say where it comes from.
        because: better reasons than the record's for knobs that were set, dotted.
    """
    values = {
        knob: Value(
            value.value, (because or {}).get(f"{group}.{knob}", value.because) if _is_set(value) else value.because
        )
        for knob, value in option_values(group, record).items()
    }
    return "\n".join([*comment_lines(heading), *yaml_lines(values)]) + "\n"


def _is_set(value: Value) -> bool:
    """Returns whether the value was configured; nothing else is known of knobs that no plan decides."""
    return value.because.startswith(("set:", AS_CONFIGURED))


def words_beside(overrides: Sequence[str], groups: Sequence[str]) -> list[str]:
    """Returns the overrides that have to be typed beside the options of ``groups``."""
    return [
        text
        for text in overrides
        if text.partition("=")[0].lstrip("+") in OF_THE_DATA or group_of(text) not in (*groups, *OF_THE_SWEEP)
    ]
