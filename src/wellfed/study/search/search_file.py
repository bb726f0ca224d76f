"""Writes and reads ``search.json``: which search a folder holds, for its readers and for the same command again."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from wellfed.record import write_atomically
from wellfed.study.search import space as spaces
from wellfed.study.search.space import Axis
from wellfed.study.sweep.folder_file import check_plain, parsed
from wellfed.study.sweep.grid import NO_AXES, group_of

FILE_NAME = "search.json"
SCHEMA = 1


@dataclass(frozen=True)
class SearchFile:
    """What a folder's trials have in common."""

    name: str
    workload: str
    metric: str
    """Of validation, without ``val/``; it ranks."""
    mode: Literal["max", "min"]
    space: dict[str, Axis]
    """With secrets as ``***``, as in ``fixed``."""
    fixed: tuple[str, ...]
    """Overrides that all trials share, those of the search itself left out."""
    sampler: str
    pruner: str
    max_trials: int
    code: str
    """What identifies the version of the code: see `wellfed.study.sweep.rows.code_version`."""
    machine: str = ""
    """Processor and GPUs, in words."""
    ids: tuple[str, ...] = ()
    """Of the points of a grid, in its order; empty where a sampler picks them."""
    flags: tuple[str, ...] = ()
    """Of the command line, where configurations are searched."""

    @property
    def higher_is_better(self) -> bool:
        """Of the metric."""
        return self.mode == "max"

    @property
    def identity(self) -> dict[str, str]:
        """What all trials have in common beside the axes, in words: with another one it is another search. What says
        how they are watched, or where they write, makes them no other trials."""
        shared = sorted(text for text in self.fixed if group_of(text) not in NO_AXES)
        return {"metric": f"val/{self.metric} ({self.mode})", "overrides": " ".join(shared)}

    def write(self, folder: Path) -> None:
        """Replace the file as a whole."""
        write_atomically(folder / FILE_NAME, json.dumps(self.to_dict(), indent=1) + "\n")

    def to_dict(self) -> dict[str, Any]:
        """What is written."""
        return {"schema": SCHEMA, **vars(self), "space": spaces.to_dict(self.space)}

    @classmethod
    def read(cls, folder: Path) -> SearchFile:
        """What a search folder says of itself.

        Raises:
            OSError: there is no such file.
            ValueError: it is not a search's, or of a schema this version does not know.
        """
        with parsed(folder / FILE_NAME, "search", SCHEMA) as found:
            known = {each.name: found[each.name] for each in fields(cls) if each.name in found}
            check_plain(cls, known)
            if known["mode"] not in ("max", "min"):
                raise ValueError(f"mode is {str(known['mode'])[:40]!r}")
            known |= {name: tuple(map(str, found.get(name, ()))) for name in ("fixed", "ids", "flags")}
            return cls(**known | {"space": spaces.from_dict(found["space"])})
