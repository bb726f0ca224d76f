"""Opens Hydra over our ``configs/`` folder and names the errors it can raise while composing."""

from __future__ import annotations

import copy
import threading
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra import version
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from wellfed import project
from wellfed.command_line import ENTRIES
from wellfed.config.hydra_internals import Hydra, command_line_parser, hydra_over
from wellfed.config.knobs import OPEN_NODES
from wellfed.config.schema import RUN_FOLDER, EvaluateConfig, RunConfig, TuneRunConfig
from wellfed.errors import ConfigError

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


@cache
def register_schemas() -> None:
    """Registers `SCHEMAS` with Hydra. Files and overrides after a schema in a defaults list are typed."""
    for name, (schema_type, base) in SCHEMAS.items():
        schema: DictConfig = OmegaConf.structured(schema_type)
        for node in (*OPEN_NODES, "trainer.lightning"):
            if (opened := OmegaConf.select(schema, node)) is not None:
                OmegaConf.set_struct(opened, False)  # `examine` reports unknown keys there
        for entry in () if base is None else fields(base):
            schema[entry.name] = MISSING  # merging the schema keeps the base's values
        ConfigStore.instance().store(name, schema, provider="wellfed")


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
    job_name = job_name if job_name in ENTRIES else "train"  # not of --config-name, as in Hydra
    return hydra_over(main_dir, [Path(extra_dir) for extra_dir in extra_dirs], job_name)


def read_flags(flags: Sequence[str]) -> Namespace:
    """Returns the flags and overrides of a command line as Hydra reads them."""
    return command_line_parser().parse_intermixed_args([*flags])


def folders_of(args: Namespace) -> dict[str, Any]:
    """Returns the arguments of `open_hydra`; ``--config-path`` is relative to the entry script, as in Hydra."""
    path, extra = args.config_path, args.config_dir
    return {
        "config_dir": None if path is None else project.sources() / path,
        "extra_dirs": [] if extra is None else [extra],
    }


_ONE_AT_A_TIME = threading.RLock()
"""Held while Hydra's only HydraConfig is another one."""


@contextmanager
def job_of(cfg: DictConfig) -> Iterator[DictConfig]:
    """Yields a configuration without its ``hydra`` node; ``${hydra:...}`` still resolves."""
    if not cfg.hydra.runtime.get("output_dir"):
        with open_dict(cfg.hydra.runtime):
            cfg.hydra.runtime.output_dir = RUN_FOLDER
    job = copy.copy(cfg)
    with open_dict(job):
        del job["hydra"]
    hydra: Any = HydraConfig.instance()
    with _ONE_AT_A_TIME:
        before, hydra.cfg = hydra.cfg, cfg
        try:
            yield job
        finally:
            hydra.cfg = before


def as_written(dotted: str) -> str:
    """Returns a value of the current job as its files or overrides have it, with interpolations; empty if unknown."""
    group, _, name = dotted.rpartition(".")
    if not HydraConfig.initialized():
        return ""
    owner = OmegaConf.select(HydraConfig.get()._get_parent(), group)  # type: ignore[attr-defined]
    node = owner._get_node(name, validate_access=False) if isinstance(owner, DictConfig) else None
    return "" if node is None else str(node._value())
