"""Opens Hydra over our ``configs/`` folder and names the errors it can raise while composing."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra import version
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, FloatNode, IntegerNode, OmegaConf, ValueNode, open_dict
from omegaconf.errors import OmegaConfBaseException

from wellfed import project
from wellfed.config.hydra_internals import Hydra, hydra_over
from wellfed.config.knobs import OPEN_NODES, entries
from wellfed.config.schema import RUN_FOLDER, EvaluateConfig, RunConfig, TuneRunConfig
from wellfed.errors import ConfigError
from wellfed.units import seconds_of

COMPOSE_ERRORS = (
    HydraException,
    OmegaConfBaseException,
    yaml.YAMLError,
    OSError,
    ValueError,  # gpu=24; also a file that is not UTF-8
    TypeError,  # a yaml key that is not a string
    AssertionError,  # e.g. a defaults entry with a number as key
    RecursionError,  # a: ${a}
)
"""Exceptions that Hydra and OmegaConf raise for faults of the user."""
SCHEMAS: Mapping[str, tuple[type, type | None]] = {
    "tune_schema": (TuneRunConfig, RunConfig),
    "run_schema": (RunConfig, None),
    "evaluate_schema": (EvaluateConfig, None),
}
"""Name of a schema -> its class, and the schema that it extends. Primary configs list it first in their defaults."""


def register_schemas() -> None:
    """Registers `SCHEMAS` with Hydra; may be called again.

    A primary config lists its schema first in its defaults. Files and overrides after it are then typed.
    """
    repo = ConfigStore.instance().repo
    for name in SCHEMAS:
        repo.setdefault(f"{name}.yaml", _StoredSchema(name, None, None, None, "wellfed"))  # type: ignore[arg-type]


class _StoredSchema(ConfigNode):
    """A schema in Hydra's store, made when it is first loaded: making one takes 20 ms, and most commands use one."""

    def __copy__(self) -> ConfigNode:
        """Returns what `ConfigStore.load`, which copies what it returns, has to return."""
        return ConfigNode(self.name, _schema(*SCHEMAS[self.name]), self.group, self.package, self.provider)


@cache
def _schema(schema_type: type, base: type | None) -> DictConfig:
    """Returns a schema without values for keys of ``base``, so that merging it keeps the base's values."""
    schema: DictConfig = OmegaConf.structured(schema_type)
    read_times(schema, schema_type)
    for name in OPEN_NODES:
        if (node := OmegaConf.select(schema, name)) is not None:
            OmegaConf.set_struct(node, False)  # `examine` reports unknown keys there
    for entry in () if base is None else fields(base):
        schema[entry.name] = MISSING
    return schema


def open_hydra(config_dir: Path | None = None, extra_dirs: Sequence[str | Path] = (), job_name: str = "train") -> Hydra:
    """Returns a Hydra that searches ``config_dir`` (None = the project's) before ``extra_dirs``, which must exist.

    ``GlobalHydra`` is not modified, so several can be open at once, also inside a multirun.
    """
    version.setbase("1.3")
    register_schemas()
    main_dir = (config_dir or project.configs()).absolute()
    if not main_dir.is_dir():
        raise ConfigError.of(str(main_dir), "is no folder of configurations.", "Name one that is.")
    for extra_dir in extra_dirs:
        if not Path(extra_dir).is_dir():
            raise ConfigError.of(f"--config-dir {extra_dir}", "is no folder.", "Name one that holds yaml files.")
    return hydra_over(main_dir, [Path(extra_dir) for extra_dir in extra_dirs], job_name)


@contextmanager
def job_of(cfg: DictConfig) -> Iterator[DictConfig]:
    """Yields a configuration without its ``hydra`` node; ``${hydra:...}`` still resolves."""
    hydra: Any = HydraConfig.instance()
    before = hydra.cfg
    if not cfg.hydra.runtime.get("output_dir"):
        with open_dict(cfg.hydra.runtime):
            cfg.hydra.runtime.output_dir = RUN_FOLDER
    hydra.cfg = cfg
    try:
        job = copy.copy(cfg)
        with open_dict(job):
            del job["hydra"]
        yield job
    finally:
        hydra.cfg = before


def read_times(schema: DictConfig, schema_type: type) -> None:
    """Lets knobs that are durations be typed as ``90s``, ``5min`` or ``2h``; their values stay numbers.

    The suffix of the name gives the unit of the number: ``_s`` seconds, ``_minutes`` minutes. This holds in files,
    overrides and axes.
    """
    for name, knob in entries(schema_type).items():
        if knob.unit_s is None:
            continue
        group, _, key = name.rpartition(".")
        owner = OmegaConf.select(schema, group)
        if owner is not None:
            node = _TimeInt() if knob.type is int else _TimeFloat()
            node.take_over(owner._get_node(key), knob.unit_s)
            owner.__dict__["_content"][key] = node


class _Time(ValueNode):
    """A node that holds a number in a unit of time."""

    _unit_s: float

    def take_over(self, node: ValueNode, unit_s: float) -> None:
        """Replaces a node: takes its value, name, parent and type."""
        node._deepcopy_impl(self, {})
        self.__dict__["_unit_s"] = unit_s

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        make: Any = type(self)
        copied = make()
        copied.take_over(self, self._unit_s)
        return copied

    def _number(self, value: Any) -> Any:
        """Returns a duration as a number in this knob's unit; other values unchanged, for the node's own check."""
        if not isinstance(value, str) or not value.rstrip()[-1:].isalpha():
            return value
        try:
            number = seconds_of(value) / self._unit_s
        except ValueError:
            return value
        return int(number) if number.is_integer() else number


class _TimeFloat(_Time, FloatNode):
    def _validate_and_convert_impl(self, value: Any) -> float:
        return super()._validate_and_convert_impl(self._number(value))


class _TimeInt(_Time, IntegerNode):
    def _validate_and_convert_impl(self, value: Any) -> int:
        return super()._validate_and_convert_impl(self._number(value))
