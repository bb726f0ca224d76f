"""Writes the page docs/configuration.md: all knobs of the schema, and the settings of the engine's options.

``python -m wellfed.config.files.knobs_page > docs/configuration.md`` writes the page; a test compares it. Workloads,
experiments, loggers and the chosen options belong to a project and are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from omegaconf import MISSING

from wellfed import project
from wellfed.config.knobs import FREE_NODES, Knob, entries, in_order, leaves
from wellfed.config.schema import EvaluateConfig, RunConfig, TuneRunConfig

PROJECT_GROUPS = ("workload", "experiment", "logger")
"""Groups whose options differ from project to project."""
_HEAD = """\
# What does each knob mean?

Made by `python -m wellfed.config.files.knobs_page > docs/configuration.md` from
[the schema](../src/wellfed/config/schema.py) and the files under `configs/`. A test fails if they differ.

- Set a knob for one run by its name: `python src/train.py loader.num_workers=4`. `null` leaves a number to the plan,
  unless the text below gives another meaning.
- An option of a group sets several knobs at once (`loader=balanced`). A typed knob overrides the option.
- `--help` lists groups and options, and marks the defaults. `--cfg job` shows the value of every knob.
- A default here is the schema's. The table of options below each group shows what they change. `--help` lists the
  options of `workload`, `experiment` and `logger`, since they belong to the project.
- The name of a knob ends with its unit: `_s` seconds, `_minutes` minutes, `_gib` GiB.
"""
_CALLBACKS = "Several go together: `callbacks=[early_stopping,ema]`; see [callbacks.md](callbacks.md#callbacks)."
_TUNE = "Takes the knobs above, which set its start, and these; see [tune.md](tune.md)."
_DEBUG = "A quick look: sets knobs of other groups."


def page(config_dir: Path | None = None) -> str:
    """Returns the whole page; ``config_dir`` holds the groups, None = the project's ``configs/``."""
    folder = config_dir or project.configs()
    knobs = [entry for entry in entries(RunConfig).values() if not entry.is_group]
    parts = [_HEAD, "## The run", _table(knob for knob in knobs if "." not in knob.name)]
    for group in dict.fromkeys(knob.name.partition(".")[0] for knob in knobs if "." in knob.name):
        own = (knob for knob in knobs if knob.name.startswith(f"{group}."))
        parts += [f"## {group}", _prose(entries(RunConfig)[group].text), _table(own)]
        if group not in PROJECT_GROUPS and (folder / group).is_dir():
            parts.append(_options(folder / group))
    tuned = (entry for name, entry in entries(TuneRunConfig).items() if name.startswith("tune."))
    evaluated = (entry for entry in entries(EvaluateConfig).values() if not entry.is_group)
    parts += ["## callbacks", _CALLBACKS, _options(folder / "callbacks"), "## debug", _DEBUG]
    parts += [_options(folder / "debug"), "## python src/tune.py", _TUNE, _table(tuned)]
    parts += ["## python src/evaluate.py", _table(evaluated)]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _table(knobs: Iterable[Knob]) -> str:
    lines = ["| knob | takes | default | meaning |", "|---|---|---|---|"]
    for knob in knobs:
        takes = "`_target_` and its arguments" if knob.name in FREE_NODES else _prose(knob.must_be)
        if knob.name == "trainer.lightning":
            takes = "arguments by name"
        default = "none: must be set" if knob.default == MISSING else f"`{_show(knob.default)}`"
        lines.append(_row(f"`{knob.name}`", takes, default, _prose(knob.text)))
    return "\n".join(lines)


def _options(folder: Path) -> str:
    lines = [f"| {folder.name}= | sets |", "|---|---|"]
    for option in in_order(path.stem for path in folder.glob("*.yaml")):
        content = yaml.safe_load((folder / f"{option}.yaml").read_text(encoding="utf-8"))
        lines.append(_row(f"`{option}`", ", ".join(_settings(content)) or "nothing: the defaults above"))
    return "\n".join(lines)


def _settings(content: Mapping[str, Any]) -> Iterator[str]:
    for entry in content.get("defaults", ()):
        if isinstance(entry, Mapping):
            yield from (f"`{key.removeprefix('override').strip(' /')}={option}`" for key, option in entry.items())
        elif entry != "_self_":
            yield f"as `{entry}`"
    settings = {key: value for key, value in content.items() if key != "defaults"}
    # Axes of a sweep are named as typed.
    yield from (f"`{name.removeprefix('hydra.sweeper.params.')}={_show(value)}`" for name, value in leaves(settings))


def _show(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_show, value))}]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(value.name if isinstance(value, Enum) else value)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _prose(text: str) -> str:
    """Escapes ``<`` outside code, since Markdown reads ``<name>`` as a tag."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(piece if piece.startswith("`") else piece.replace("<", r"\<") for piece in pieces)


if __name__ == "__main__":
    print(page(), end="")
