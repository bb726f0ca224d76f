"""Measures the disk space of a base install, of each extra and of each package.

    python benchmarks/dependency_sizes.py [--extras hf,audio] [--date 2026-11-25]

Installs a clone of this repository into an empty virtual environment, in the versions of constraints.txt, and measures
its site-packages. For each extra a copy of that environment is made and the extra installed on top. ``all`` is what was
installed before there were extras: what the examples and the pages need. Sizes are of the files on the disk, bytecode
that pip has compiled among them. PyTorch's build decides most of it: its size is given apart.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from measuring import write_record

REPO = Path(__file__).resolve().parents[1]
EXTRAS = (
    "hf",
    "audio",
    "tables",
    "mat",
    "images",
    "testing",
    "search",
    "serve",
    "tensorboard",
    "mlflow",
    "slurm",
    "ray",
)
ALL = "examples"
LIST = """
import importlib.metadata, json, os
def size(file):
    return os.stat(file.locate()).st_blocks * 512 if os.path.isfile(file.locate()) else 0
def wants(each):
    return [want for want in each.requires or () if "extra" not in want]
found = importlib.metadata.distributions()
print(json.dumps({each.metadata["Name"]: [sum(map(size, each.files or ())), wants(each)] for each in found}))
"""
"""Run in an environment: name -> bytes on the disk, and what it requires."""

Installed = Mapping[str, tuple[int, list[str]]]
"""Distribution -> bytes, and the names that it requires."""


def normal(requirement: str) -> str:
    return re.split(r"[\[<>=!~;( ]", requirement)[0].lower().replace("_", "-").replace(".", "-")


def installed(venv: Path) -> Installed:
    """Returns the distributions of an environment, without pip itself."""
    done = subprocess.run([venv / "bin/python", "-c", LIST], check=True, capture_output=True, text=True)
    found = {normal(name): (size, list(map(normal, wants))) for name, (size, wants) in json.loads(done.stdout).items()}
    return {name: entry for name, entry in found.items() if name != "pip"}


def pip_install(venv: Path, *what: str) -> None:
    command = [venv / "bin/python", "-m", "pip", "install", "--quiet", "-c", REPO / "constraints.txt", *what]
    subprocess.run(command, check=True)  # type: ignore[arg-type]


def reached(found: Installed, roots: Iterable[str]) -> set[str]:
    """Returns the roots and everything that they require."""
    seen, todo = set[str](), list(roots)
    while todo:
        if (name := todo.pop()) in found and name not in seen:
            seen.add(name)
            todo += found[name][1]
    return seen


def mib(found: Installed, names: Iterable[str]) -> float:
    return round(sum(found[name][0] for name in names) / 2**20, 1)


def totals(found: Installed) -> dict[str, Any]:
    """Sizes of an environment, with PyTorch and without it."""
    return {
        "num_distributions": len(found),
        "total_mib": mib(found, found),
        "without_torch_mib": mib(found, found.keys() - {"torch"}),
    }


def of_each(found: Installed) -> list[dict[str, Any]]:
    """Each direct dependency: its own size, and that of it and all else that would go if it alone went."""
    direct = found["wellfed"][1]
    rows = []
    for name in direct:
        only = reached(found, direct) - reached(found, (other for other in direct if other != name))
        rows.append({"package": name, "own_mib": mib(found, [name]), "saved_without_it_mib": mib(found, only)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--extras", default=",".join(EXTRAS))
    parser.add_argument("--date", default=f"{datetime.now(UTC):%Y-%m-%d}")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch) / "base"
        subprocess.run(["git", "clone", "--quiet", REPO, Path(scratch) / "clone"], check=True)
        describe = ["git", "-C", Path(scratch) / "clone", "describe", "--always"]
        commit = subprocess.run(describe, capture_output=True, check=True)  # type: ignore[arg-type]
        subprocess.run([sys.executable, "-m", "venv", base], check=True)
        pip_install(base, str(Path(scratch) / "clone"))
        first = installed(base)
        results = [{"installed": "wellfed", **totals(first)}]
        for extra in (*chosen.extras.split(","), ALL):
            copy = Path(scratch) / "copy"
            shutil.copytree(base, copy, symlinks=True, copy_function=os.link)
            pip_install(copy, f"wellfed[{extra}]")
            found = installed(copy)
            results.append({"installed": f"wellfed[{extra}]", **totals(found)})
            added = {name: mib(found, [name]) for name in sorted(found.keys() - first.keys())}
            print(json.dumps({**results[-1], "added_mib": added}), flush=True)
            shutil.rmtree(copy)
    base_mib, all_mib = results[0]["without_torch_mib"], results[-1]["without_torch_mib"]
    record = {
        "theme": "dependency_sizes",
        "date": chosen.date,
        "command": f"python benchmarks/dependency_sizes.py --extras {chosen.extras}",
        "git": commit.stdout.decode().strip(),
        "machine": {"python": platform.python_version(), "system": platform.system()},
        "config": {"constraints": "constraints.txt", "torch": "the build that pip takes on this machine"},
        "results": results,
        "packages": of_each(first),
        "raw": {name: size for name, (size, _) in sorted(first.items())},
        "says": f"Without PyTorch a base install takes {base_mib:.0f} MiB in {len(first)} distributions; with all that "
        f"the examples and pages need it takes {all_mib:.0f} MiB in {results[-1]['num_distributions']}.",
    }
    out = REPO / "benchmarks" / "records" / f"{chosen.date}_dependency_sizes_cpu.json"
    write_record(record, out)
    print(record["says"])


if __name__ == "__main__":
    main()
