"""Helps benchmarks to compare variants in turns, and to write a record: a summary, one row of results a line."""

from __future__ import annotations

import functools
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from wellfed.observe.hardware.detect import machine
from wellfed.observe.timing.interval import student_t
from wellfed.record.provenance import git_state

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # modules are compiled once, as at a user's second command
ROOT = Path(__file__).resolve().parents[1]
WIDTH = 240
"""Columns of a record; a list or object that is longer is broken."""
NOT_INSTALLED, NO_PEER, COUNTED = "not installed", "no peer", "counted"
_MACHINE = ("cpu", "cpu_quota_cores", "ram_gib", "gpus", "load", "load_before", "os")
_VERSIONS = ("python", "torch", "lightning", "numpy")
_PLACES = {"--out", "--folder", "--work", "--cache", "--keep", "--data"}
"""Options that name a place on this machine."""


@functools.cache
def has(*packages: str) -> bool:
    """Returns whether all these packages can be imported, in a process of its own. Says which one can't be."""
    for package in packages:
        if find_spec(package) is None:
            return False
        tried = subprocess.run([sys.executable, "-c", f"import {package}"], capture_output=True, text=True, check=False)
        if tried.returncode:
            reason = (tried.stderr.strip() or "no message").splitlines()[-1]
            print(f"{package} is installed and can't be imported: {reason}", file=sys.stderr)
            return False
    return True


def turned(names: Iterable[str], number: int) -> list[str]:
    """Returns the names in the order of a round: another one comes first in each."""
    listed = list(names)
    at = number % len(listed)
    return listed[at:] + listed[:at]


def interval(values: Sequence[float]) -> list[float]:
    """Returns the 95 % interval of the mean; empty for a single value."""
    if len(values) < 2:
        return []
    half = student_t(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return [statistics.fmean(values) - half, statistics.fmean(values) + half]


def ratios(raw: Mapping[str, Sequence[float]], name: str, other: str) -> list[float]:
    """Returns a ratio a round."""
    return [mine / its for mine, its in zip(raw[name], raw[other], strict=True)]


def mean_ratio(values: Sequence[float]) -> tuple[float, list[float]]:
    """Returns the geometric mean of ratios and its 95 % interval, which is empty for a single one."""
    logs = [math.log(value) for value in values]
    return math.exp(statistics.fmean(logs)), [math.exp(bound) for bound in interval(logs)]


def compared(
    what: str,
    unit: str,
    ours: Sequence[float],
    peers: Mapping[str, Sequence[float] | None],
    *,
    less_is_better: bool = False,
) -> list[dict[str, Any]]:
    """Returns a row of the table of `bench.py` for each peer.

    Args:
        what: the case.
        ours: positive figures, one a round.
        peers: figures of the same rounds, by name; None = the peer is not installed.

    Returns:
        Rows with the medians of both, ``ours`` and ``theirs``, and how many ``times`` better ours is: the geometric
        mean over the rounds, and its interval.
    """
    rows = []
    for peer, theirs in peers.items():
        row: dict[str, Any] = {"what": what, "unit": unit, "peer": peer, "n": len(ours)}
        row["ours"] = _short(statistics.median(ours))
        if theirs is None:
            rows.append({**row, "verdict": NOT_INSTALLED})
            continue
        pairs = zip(theirs, ours, strict=True) if less_is_better else zip(ours, theirs, strict=True)
        times, ci95 = mean_ratio([better / worse for better, worse in pairs])
        verdict = "level" if not ci95 or ci95[0] <= 1 <= ci95[1] else "better" if times > 1 else "worse"
        row |= {"theirs": _short(statistics.median(theirs)), "times": _short(times), "ci95": [*map(_short, ci95)]}
        rows.append({**row, "verdict": verdict})
    return rows


def alone(what: str, unit: str, ours: Sequence[float]) -> dict[str, Any]:
    """Returns a row of the table of `bench.py` for figures that no peer has."""
    row = {"what": what, "unit": unit, "peer": "", "n": len(ours), "ours": _short(statistics.median(ours))}
    return {**row, "verdict": NO_PEER}


def counted(what: str, ours: float, theirs: Mapping[str, float]) -> list[dict[str, Any]]:
    """Returns rows of the table of `bench.py` for counts, which a busy machine does not change, one for each peer."""
    return [
        {"what": what, "unit": "", "peer": peer, "n": 1, "ours": ours, "theirs": number}
        | {"times": _short(number / ours), "ci95": [], "verdict": COUNTED}
        for peer, number in theirs.items()
    ]


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def shown(row: Mapping[str, Any]) -> str:
    """Returns a row of `compared` as a line."""
    if "ours" not in row:
        return f"{row['what']}: {row['peer']} {row['verdict']}"
    figures = f"{row['what']} [{row['unit']}]: {row['ours']:.4g}, {row['peer']} "
    if "theirs" not in row:
        return figures + str(row["verdict"])
    bounds = " to ".join(f"{bound:.3g}" for bound in row["ci95"]) or COUNTED
    return f"{figures}{row['theirs']:.4g}, {row['times']:.3g} times better ({bounds}; n={row['n']})"


def finish(
    theme: str, results: Sequence[Any], says: str, out: Path | None, *, config: Mapping[str, Any], **more: Any
) -> None:
    """Prints the finding; writes the record where told to, with the time, the command, the commit and the machine.

    Args:
        out: file of the record; None = no record.
        more: other keys of the record, which replace those of the same name.
    """
    for row in more.get("compared", ()):
        print(shown(row))
    print(says, flush=True)
    if out is None:
        return
    record = {
        "theme": theme,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *_without_places(sys.argv[1:])]),
        "git": {key: value for key, value in (git_state(ROOT) or {}).items() if key != "diff"},
        "machine": {"load": os.getloadavg(), **asdict(machine())},
        "config": config,
        "results": results,
        **more,
        "says": says,
    }
    write_record(record, out)


def _without_places(words: Sequence[str]) -> list[str]:
    """Returns the arguments without the folders and files of this machine."""
    return [word for before, word in pairwise(["", *words]) if not {before, word} & _PLACES]


def write_record(record: Mapping[str, Any], out: Path) -> None:
    """Writes all of a record but ``raw``, and of its machine what a reader compares."""
    kept = {key: value for key, value in record.items() if key != "raw"}
    if isinstance(kept.get("machine"), Mapping):
        kept["machine"] = _facts(kept["machine"])
    half = out.with_name(f"{out.name}.part")
    half.write_text(as_rows(_rounded(kept)) + "\n", encoding="utf-8")
    half.replace(out)


def as_rows(value: Any, indent: int = 0, before: int = 0, *, is_row: bool = False) -> str:
    """Returns JSON in which everything that fits within `WIDTH` columns, ``before`` of them taken, is on one line.

    A row of a list is on one line, whatever its length, unless it holds rows itself.
    """
    line = json.dumps(value, ensure_ascii=False)
    is_short = len(line) + max(indent, before) <= WIDTH or (is_row and not _holds_rows(value))
    if is_short or not isinstance(value, (dict, list)) or not value:
        return line
    inner = " " * (indent + 1)
    if isinstance(value, dict):
        keys = {key: f"{inner}{json.dumps(key)}: " for key in value}
        rows = [f"{keys[key]}{as_rows(each, indent + 1, len(keys[key]))}" for key, each in value.items()]
        return "{\n" + ",\n".join(rows) + "\n" + " " * indent + "}"
    rows = [f"{inner}{as_rows(each, indent + 1, is_row=True)}" for each in value]
    return "[\n" + ",\n".join(rows) + "\n" + " " * indent + "]"


def _holds_rows(value: Any) -> bool:
    """Returns whether a list of objects is somewhere in a value."""
    if isinstance(value, list):
        return any(isinstance(each, dict) or _holds_rows(each) for each in value)
    return isinstance(value, dict) and any(map(_holds_rows, value.values()))


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
