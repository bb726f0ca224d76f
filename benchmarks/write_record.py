"""Writes the record of a benchmark: its summary, without single measurements, one row of results a line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WIDTH = 240
"""Columns of a record; a list or object that is longer is broken."""
_MACHINE = ("cpu", "cpu_quota_cores", "ram_gib", "gpus", "load", "load_before", "os")
_VERSIONS = ("python", "torch", "lightning", "numpy")


def write_record(record: Mapping[str, Any], out: Path) -> None:
    """Writes all of a record but ``raw``, and of its machine what a reader compares."""
    kept = {key: value for key, value in record.items() if key != "raw"}
    if isinstance(kept.get("machine"), Mapping):
        kept["machine"] = _facts(kept["machine"])
    out.write_text(as_rows(_rounded(kept)) + "\n", encoding="utf-8")


def as_rows(value: Any, indent: int = 0, before: int = 0) -> str:
    """Returns JSON in which everything that fits within `WIDTH` columns, ``before`` of them taken, is on one line."""
    line = json.dumps(value, ensure_ascii=False)
    if len(line) + max(indent, before) <= WIDTH or not isinstance(value, (dict, list)) or not value:
        return line
    inner = " " * (indent + 1)
    if isinstance(value, dict):
        keys = {key: f"{inner}{json.dumps(key)}: " for key in value}
        rows = [f"{keys[key]}{as_rows(each, indent + 1, len(keys[key]))}" for key, each in value.items()]
        return "{\n" + ",\n".join(rows) + "\n" + " " * indent + "}"
    rows = [f"{inner}{as_rows(each, indent + 1)}" for each in value]
    return "[\n" + ",\n".join(rows) + "\n" + " " * indent + "]"


def _facts(machine: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: machine[key] for key in _MACHINE if machine.get(key)}
    versions = machine.get("versions") or {}
    return {**kept, "versions": {key: versions[key] for key in _VERSIONS if key in versions}}


def _rounded(value: Any) -> Any:
    """Returns the value with 6 significant digits in each float."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, (list, tuple)) else value
