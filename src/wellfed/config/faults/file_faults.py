"""Finds faults of yaml files: unreadable files, and entries that the schema refuses, with file and line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_loader import ConfigLoader
from hydra.core.default_element import ResultDefault
from hydra.errors import ConfigCompositionException
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from wellfed.config.faults.explain_refusal import explain
from wellfed.config.hydra_internals import CachingConfigRepository, load_file
from wellfed.config.knobs import leaves
from wellfed.errors import ConfigError, Fault

_UNREADABLE = (yaml.YAMLError, OSError, ValueError, AssertionError, RecursionError, OmegaConfBaseException)


class NamingRepository(CachingConfigRepository):
    """A config repository whose errors name the file."""

    def load_config(self, config_path: str) -> ConfigResult | None:
        """Returns the file, or None if there is no such file.

        Raises:
            ConfigError: it is unreadable.
        """
        try:
            return super().load_config(config_path)
        except _UNREADABLE as error:
            raise ConfigError([_unreadable(self.file_of(config_path), error)]) from error

    def file_of(self, config_path: str) -> Path:
        """Returns the path of a file in the search path, or the bare name of a schema."""
        for source in self.get_sources():
            for suffix in ("", ".yaml"):
                found = Path(source.path) / f"{config_path}{suffix}"
                if source.scheme() == "file" and found.is_file():
                    return found
        return Path(config_path)


def show_file(path: Path) -> str:
    """Returns a path relative to the current directory if it lies below it."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def merge_files(
    loader: ConfigLoader, defaults: list[ResultDefault], repo: NamingRepository
) -> tuple[DictConfig, list[Fault]]:
    """Merges all chosen files as Hydra would; returns the result, and the faults of refused entries."""
    cfg = OmegaConf.create()
    refused: list[Fault] = []
    for default in defaults:
        file = repo.file_of(str(default.config_path))
        try:
            config: Any = load_file(loader, repo, default)
        except (ConfigCompositionException, ValueError) as error:
            refused.append(Fault(show_file(file), f"{error}".splitlines()[0], ""))
            continue
        try:
            cfg.merge_with(config)
        except (OmegaConfBaseException, ValueError, TypeError):
            refused += _merge_by_key(cfg, config, file, default.package or "")
    return cfg, refused


def _merge_by_key(cfg: DictConfig, config: Any, file: Path, package: str) -> Iterator[Fault]:
    schema_type = OmegaConf.get_type(cfg) or dict
    root = yaml.compose(file.read_text(encoding="utf-8")) if file.is_file() else None
    lines = dict(_key_lines(root, "" if package == "_global_" else package))
    for dotted, value in leaves(OmegaConf.to_container(config)):
        try:
            OmegaConf.update(cfg, dotted, value, merge=True)
        except (OmegaConfBaseException, ValueError, TypeError) as error:
            line = f":{lines[dotted]}" if dotted in lines else ""
            text = "null" if value is None else str(value)
            text = text if len(text) <= 60 else f"{text[:57]}..."
            yield Fault(f"{show_file(file)}{line}: {dotted}={text}", *explain(schema_type, dotted, error))


def _key_lines(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, int]]:
    """Yields dotted names with their lines, counted from 1."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = f"{prefix}.{key.value}" if prefix else str(key.value)
            yield name, key.start_mark.line + 1
            yield from _key_lines(value, name)


def _unreadable(file: Path, error: Exception) -> Fault:
    where = show_file(file)
    match error:
        case yaml.MarkedYAMLError(problem=str(problem), problem_mark=yaml.Mark() as mark):
            tab = "\\t" in problem
            way_out = "Indent with blanks, never tabs." if tab else "Check indentation and colons there."
            return Fault(f"{where}:{mark.line + 1}", f"is not yaml at column {mark.column + 1}: {problem}.", way_out)
        case UnicodeDecodeError():
            return Fault(where, "is not UTF-8 text.", "Save it as UTF-8.")
        case OSError():
            return Fault(where, f"can't be read: {error.strerror or error}.", "Check its permissions.")
        case AssertionError():
            return Fault(where, "has a defaults list that can't be read.", "Write '- group: option' lines in it.")
    # A yaml anchor inside itself arrives as an OmegaConf error of a thousand lines.
    reason = str(error).splitlines()[0][:200].rstrip(".")
    return Fault(where, f"can't be used: {reason}.", "Write 'knob: value' lines.")
