"""The page docs/configuration.md: every knob of the schema, and what the options of the engine's groups set.

``python -m wellfed.config.reference > docs/configuration.md`` writes it anew; a test holds the page to it. What a
project decides for itself (its workloads and experiments, where it logs, which options are chosen) is not in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args

import yaml
from omegaconf import MISSING

from wellfed.config.docs import help_of
from wellfed.config.faults.knobs import FREE_NODES, in_order, in_words, knob_type, type_of
from wellfed.config.ranges import RANGES
from wellfed.config.schema import EvaluateConfig, RunConfig
from wellfed.config.session import default_config_dir

OF_THE_PROJECT = ("workload", "experiment", "logger")
"""Groups whose options differ from project to project."""
_HEAD = """\
# Configuration

Made by `python -m wellfed.config.reference > docs/configuration.md` from
[the schema](../src/wellfed/config/schema.py), [its ranges](../src/wellfed/config/ranges.py) and the files under
`configs/`; a test fails where they differ.

A knob is set by its name, for one run: `python src/train.py loader.num_workers=4`. Where a number may be `null`, that
means that the plan decides, or what the text says. An option of a group sets several knobs at once
(`loader=balanced`); a knob that is typed wins over the option. `--help` lists groups and options and marks those that
are chosen where nothing is typed; `--cfg job` shows the value of every knob. A default here is the schema's; what an
option changes stands below its group. The options of `workload`, `experiment` and `logger` are the project's own: see
`--help`.
"""
_DEBUG = "A quick look: sets knobs of other groups."

_Knob = tuple[str, type, Field[Any]]
"""Name as typed, the class of the schema that it is a field of, the field."""


def page(config_dir: Path | None = None) -> str:
    """The whole page.

    Args:
        config_dir: where the groups are; None = the project's ``configs/``.
    """
    folder = config_dir or default_config_dir()
    knobs = list(_knobs(RunConfig))
    parts = [_HEAD, "## The run", _table(knob for knob in knobs if "." not in knob[0])]
    for group in dict.fromkeys(name.partition(".")[0] for name, _, _ in knobs if "." in name):
        own = (knob for knob in knobs if knob[0].startswith(f"{group}."))
        parts += [f"## {group}", _prose(help_of(group)), _table(own)]
        if group not in OF_THE_PROJECT and (folder / group).is_dir():
            parts.append(_options(folder / group))
    parts += ["## debug", _DEBUG, _options(folder / "debug")]
    parts += ["## python src/evaluate.py", _table(_knobs(EvaluateConfig))]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _knobs(owner: type, prefix: str = "") -> Iterator[_Knob]:
    """All knobs in the schema's order; those of a list's entries follow the list."""
    for entry in fields(owner):
        name, inner = f"{prefix}{entry.name}", type_of(owner, entry.name)
        if _is_group(inner):
            yield from _knobs(inner, f"{name}.")
            continue
        yield name, owner, entry
        for listed in filter(_is_group, get_args(inner)):
            yield from _knobs(listed, f"{name}[].")


def _is_group(kind: Any) -> bool:
    return is_dataclass(kind)


def _table(knobs: Iterable[_Knob]) -> str:
    lines = ["| knob | takes | default | range | meaning |", "|---|---|---|---|---|"]
    for name, owner, entry in knobs:
        takes = in_words(knob_type(owner, entry.name))
        if name in FREE_NODES:
            takes = "`_target_` and its arguments"
        allowed = f"`{RANGES[name]}`" if name in RANGES else ""
        lines.append(_row(f"`{name}`", takes, _default(entry), allowed, _prose(help_of(entry.name, owner))))
    return "\n".join(lines)


def _default(entry: Field[Any]) -> str:
    value = entry.default if entry.default_factory is NO_DEFAULT else entry.default_factory()
    return "none: must be set" if value == MISSING else f"`{_show(getattr(value, 'name', value))}`"


def _options(folder: Path) -> str:
    lines = [f"| {folder.name}= | sets |", "|---|---|"]
    for option in in_order(path.stem for path in folder.glob("*.yaml")):
        content = yaml.safe_load((folder / f"{option}.yaml").read_text(encoding="utf-8"))
        lines.append(_row(f"`{option}`", ", ".join(_settings(content))))
    return "\n".join(lines)


def _settings(content: Mapping[str, Any]) -> Iterator[str]:
    for entry in content.get("defaults", ()):
        if isinstance(entry, Mapping):
            yield from (f"`{key.removeprefix('override').strip(' /')}={option}`" for key, option in entry.items())
        elif entry != "_self_":
            yield f"as `{entry}`"
    yield from (f"`{text}`" for key, value in content.items() if key != "defaults" for text in _flat(key, value))


def _flat(name: str, value: Any) -> Iterator[str]:
    if not isinstance(value, Mapping):
        yield f"{name}={_show(value)}"
        return
    for key, inner in value.items():
        # An axis of a sweep is named as it is typed.
        yield from _flat(key if name == "hydra.sweeper.params" else f"{name}.{key}", inner)


def _show(value: Any) -> str:
    """As it is typed."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(_show, value))}]"
    return str(value)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _prose(text: str) -> str:
    """Text outside code, where Markdown would take ``<name>`` for a tag."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(piece if piece.startswith("`") else piece.replace("<", r"\<") for piece in pieces)


if __name__ == "__main__":
    print(page(), end="")
