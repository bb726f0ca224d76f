"""Checks a composed configuration: missing values, broken interpolations, rules, targets."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple

from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from wellfed.config.faults.explain_refusal import explain
from wellfed.config.faults.target_faults import TARGET, check_static
from wellfed.config.knobs import OPEN_NODES, entries
from wellfed.config.rules import rule_faults
from wellfed.config.schema import RunConfig, SearchSampler
from wellfed.errors import Fault
from wellfed.extras import absence, install, is_installed

LOGGERS = ("tensorboard", "mlflow")
"""Knobs of the group logger, each named after its package and its extra."""


class _Hole(NamedTuple):
    """An entry without a usable value."""

    dotted: str
    fault: Fault
    known: bool = True
    """Whether the schema has the knob; not for ``+gpu.foo=1``."""


def examine(job: DictConfig) -> tuple[Any, list[Fault]]:
    """Returns the typed form of a composed configuration (without its ``hydra`` node), and its faults.

    Rules and names of targets are checked if all values are there. Else the typed form has defaults in their place; it
    is None if a knob is unknown.

    Args:
        job: typed by a schema; not modified.
    """
    schema_type = OmegaConf.get_type(job)
    if schema_type is None or not is_dataclass(schema_type):
        way_out = "List '- run_schema' first in the defaults of the primary config."
        return None, [Fault("configuration", "has no schema.", way_out)]
    holes = list(_holes(job, schema_type))
    if holes:
        job = copy.deepcopy(job)
        known = entries(schema_type)
        for hole in holes:
            value = known[hole.dotted].default if hole.dotted in known else None
            if value == MISSING:
                value = {int: 1, str: "unknown"}.get(known[hole.dotted].type)
            if hole.known:
                OmegaConf.update(job, hole.dotted, value, merge=False)
        is_typed = all(hole.known for hole in holes)
        return OmegaConf.to_object(job) if is_typed else None, [hole.fault for hole in holes]
    config: Any = OmegaConf.to_object(job)
    faults = rule_faults(config)
    if isinstance(config, RunConfig):
        faults += [*check_static(config), *absent_packages(config)]
    return config, faults


def _holes(node: DictConfig | ListConfig, schema_type: type, prefix: str = "") -> Iterator[_Hole]:
    if node._is_none() or node._is_missing():
        return
    is_list = isinstance(node, ListConfig)
    for key in range(len(node)) if is_list else list(node.keys()):
        dotted = f"{prefix}[{key}]" if is_list else f"{prefix}.{key}" if prefix else str(key)
        child: Any = node._get_node(key)
        closed = not is_list and OmegaConf.get_type(node) is not dict
        is_misspelt = prefix == "paths" and get_close_matches(dotted, entries(schema_type), 1, cutoff=0.9)
        is_argument = prefix in OPEN_NODES and (TARGET in node or (prefix == "paths" and not is_misspelt))
        if closed and not is_argument and dotted not in entries(schema_type):
            problem, way_out = explain(schema_type, dotted)
            yield _Hole(dotted, Fault(f"{dotted}={child._value()}", problem, way_out), known=False)
            continue
        knob = entries(schema_type).get(dotted) if closed else None
        reason = why_unresolved(node, key) if child._is_interpolation() else ""
        if reason:
            text = f"{dotted}={child._value()}"
            is_another_type = "could not be converted" in reason
            folder = re.search(r"'(paths\.\w+)' not found", reason)
            way_out = f"Add it: +{folder[1]}=<folder>" if folder else "Name a knob that is set."
            way_out = f"It must be {knob.must_be}." if knob and is_another_type else way_out
            yield _Hole(dotted, Fault(text, f"can't be resolved: {reason}.", way_out))
        elif child._is_missing():
            way_out = f"Set {dotted}=<value>" + (f": {knob.text}" if knob else ".")
            yield _Hole(dotted, Fault(dotted, "has no value (???), and must have one.", way_out))
        elif isinstance(child, (DictConfig, ListConfig)):
            yield from _holes(child, schema_type, dotted)


def why_unresolved(node: Any, key: Any) -> str:
    """Returns why an entry can't be resolved; empty if it can."""
    try:
        node[key]
    except RecursionError:
        return "it refers to itself"
    except (OmegaConfBaseException, ValueError) as error:
        return str(error).splitlines()[0].rstrip(".")
    return ""


def absent_packages(config: RunConfig) -> Iterator[Fault]:
    """Yields a fault for each missing package that the configuration needs; imports none."""
    for name in LOGGERS:
        if getattr(config.logger, name) and not is_installed(name):
            way_out = f"Install it: {install(name)}; or leave out logger={name}."
            yield Fault(f"logger.{name}=true", absence(name)[0], way_out)
    sampler = config.search.sampler
    if sampler is not SearchSampler.grid and not is_installed("optuna"):
        way_out = f"Install it: {install('search')}; or name a grid of values, with search=grid."
        yield Fault(f"search.sampler={sampler.name}", absence("optuna")[0], way_out)
