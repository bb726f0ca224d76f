"""Writes a configuration as an option of the experiment group: choices, what was typed, what was planned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from wellfed.config.compose import SECRET_SHOWN, Composed, unchecked_values
from wellfed.config.option_file import Value, check_name, comment_lines, write_files, yaml_lines
from wellfed.config.session import default_config_dir
from wellfed.errors import ConfigError, Fault

_NOT_CHOSEN = ("experiment", "debug", "sweep", "paths", "hydra", "logger")
"""Groups that an experiment does not fix: what the first two set stands among the values."""
_OF_ONE_RUN = ("seed", "resume", "rerun", "paths", "logger", "sweep")
"""Knobs that say nothing about how a run is fed."""


def free_path(name: str, *, replaces: bool, config_dir: Path | None = None) -> Path:
    """Where an experiment of that name is written.

    Raises:
        ConfigError: the name will not do, or a file is there already and may not be replaced.
    """
    check_name(name, "--write")
    path = (config_dir or default_config_dir()) / "experiment" / f"{name}.yaml"
    if path.exists() and not replaces:
        raise ConfigError([Fault(f"--write {name}", f"{path} is there already.", "Add --force, or take another name.")])
    return path


def write_experiment(
    name: str,
    composed: Composed[Any],
    planned: Mapping[str, Value],
    *,
    heading: str,
    replaces: bool = False,
    config_dir: Path | None = None,
) -> Path:
    """``experiment/<name>.yaml``, with which the same configuration composes, and the planned values are set.

    Args:
        planned: by dotted knob.
        replaces: a file of that name may be written over.

    Raises:
        ConfigError: the name, a file that is there already, or a folder that can't be written to; nothing is
            written then.
    """
    path = free_path(name, replaces=replaces, config_dir=config_dir)
    chosen = {group: option for group, option in composed.choices.items() if group not in _NOT_CHOSEN}
    # The choices alone may break a rule that what was typed beside them keeps.
    plain = unchecked_values([f"{group}={option}" for group, option in chosen.items()], config_dir=config_dir)
    typed = {
        dotted: value
        for dotted, value in _leaves(composed.resolved)
        if dotted.split(".")[0] not in _OF_ONE_RUN
        and dotted not in planned
        and value != SECRET_SHOWN
        and _at(plain, dotted) != value
    }
    text = _text(heading, chosen, typed, planned)
    way_out = "Free space or make its folder writable; without --write the plan is shown alone."
    write_files({path: text}, f"--write {name}", way_out)
    return path


def _text(heading: str, chosen: Mapping[str, str], typed: Mapping[str, Any], planned: Mapping[str, Value]) -> str:
    lines = ["# @package _global_", *comment_lines(heading), "defaults:"]
    lines += [f"  - override /{group}: {option}" for group, option in sorted(chosen.items())]
    tree: dict[str, Any] = {}
    for dotted, value in typed.items():
        _put(tree, dotted, Value(value, "as given"))
    for dotted, entry in planned.items():
        _put(tree, dotted, entry)
    return "\n".join([*lines, *yaml_lines(tree)]) + "\n"


def _put(tree: dict[str, Any], dotted: str, value: Value) -> None:
    *groups, key = dotted.split(".")
    for group in groups:
        tree = tree.setdefault(group, {})
    tree[key] = value


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + str(key), value


def _at(tree: Any, dotted: str) -> Any:
    for key in dotted.split("."):
        if not isinstance(tree, Mapping) or key not in tree:
            return _ABSENT
        tree = tree[key]
    return tree


_ABSENT = object()
