"""Writes a configuration as an option of the experiment group: choices, overrides, planned values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wellfed import project
from wellfed.config.compose import Composed, unchecked_values
from wellfed.config.files.option_file import Value, check_name, comment_lines, typed, write_files, yaml_lines
from wellfed.config.hydra_session import folders_of, read_flags
from wellfed.config.knobs import leaves
from wellfed.errors import ConfigError
from wellfed.masking import SECRET_SHOWN
from wellfed.record.entries import filled_in

_GROUPS_LEFT_OUT = ("experiment", "debug", "sweep", "paths", "hydra", "logger")
"""Groups whose choice is not written; the settings of the first two are written as values."""
_KNOBS_LEFT_OUT = ("seed", "resume", "rerun", "paths", "logger", "sweep")
"""Knobs of a single run, which are not written."""
_ABSENT = object()


def free_path(name: str, *, replaces: bool, flag: str = "--write", flags: Sequence[str] = ()) -> Path:
    """Returns the file of a new experiment, else raises a ConfigError.

    Args:
        flag: flag with which the name was typed.
        flags: of the command whose configuration is written: see `Composed.flags`.
    """
    check_name(name, flag)
    path = (folders_of(read_flags(flags))["config_dir"] or project.configs()) / "experiment" / f"{name}.yaml"
    if path.exists() and not replaces:
        raise ConfigError.of(typed(flag, name), f"{path} is there already.", "Add --force, or take another name.")
    return path


def write_experiment(
    name: str,
    composed: Composed[Any],
    planned: Mapping[str, Value],
    *,
    heading: str,
    flag: str = "--write",
    replaces: bool = False,
) -> Path:
    """Writes ``experiment/<name>.yaml``, which composes the same configuration and sets the ``planned`` knobs, each
    with its reason.

    Args:
        flag: flag with which the name was typed.

    Raises:
        ConfigError: the name is invalid, or the file can't be written; nothing is written.
    """
    path = free_path(name, flag=flag, replaces=replaces, flags=composed.flags)
    chosen = {group: option for group, option in composed.choices.items() if group not in _GROUPS_LEFT_OUT}
    # The choices alone may break a rule that the typed overrides satisfy.
    options = [f"{group}={option}" for group, option in chosen.items()]
    unchanged = dict(leaves(unchecked_values(options, composed.flags)))
    values = {
        dotted: Value(value, "as given")
        for dotted, value in leaves(composed.resolved)
        if dotted.split(".")[0] not in _KNOBS_LEFT_OUT and value not in (SECRET_SHOWN, unchanged.get(dotted, _ABSENT))
    }
    tree = filled_in({}, values | dict(planned))
    defaults = [f"  - override /{group}: {option}" for group, option in sorted(chosen.items())]
    lines = ["# @package _global_", *comment_lines(heading), "defaults:", *defaults, *yaml_lines(tree)]
    write_files({path: "\n".join(lines) + "\n"}, typed(flag, name), replaces=replaces)
    return path
