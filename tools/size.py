"""Prints the lines of Python of each wing beside its cap, and fails where a wing is over it.

A cap falls with the work on its wing, to the target. Nobody raises one without a sentence here that says why.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENGINE = "src/wellfed"
WINGS = {
    # wing: (cap, target)
    "cli": (2305, 1700),
    "testing": (624, 480),
    "study": (9557, 4800),
    "run": (8017, 4200),
    "watch": (4640, 1700),
    "explain": (9620, 5300),
    "plan": (5256, 2500),
    "train": (8757, 4300),
    "observe": (5884, 3700),
    "data": (5530, 2700),
    "config": (3920, 2700),
    "core": (3587, 2700),
}
"""Wing of the engine -> cap and target, in lines."""
FOLDERS = {
    "engine": (67700, 38000),
    "src/workloads": (9426, 4800),
    "tests": (98783, 50000),
    "benchmarks": (13620, 6500),
    "tools, hooks, template": (2600, 1600),
}
"""Part of the repository -> cap and target, in lines."""


def lines(*folders: str) -> int:
    """Returns the number of lines of all Python files below the folders."""
    return sum(len(file.read_bytes().splitlines()) for folder in folders for file in (ROOT / folder).rglob("*.py"))


def main() -> int:
    """Prints the table; returns 1 where a cap is exceeded."""
    watch = lines(f"{ENGINE}/run/watch", f"{ENGINE}/monitor", f"{ENGINE}/watch")
    counts = {wing: lines(f"{ENGINE}/{wing}") for wing in WINGS if wing not in ("watch", "run", "core")}
    counts["watch"] = watch
    counts["run"] = lines(f"{ENGINE}/run") - lines(f"{ENGINE}/run/watch")
    engine = lines(ENGINE, "src/hydra_plugins")
    counts["core"] = engine - sum(counts.values())
    counts |= {
        "engine": engine,
        "src/workloads": lines("src/workloads"),
        "tests": lines("tests"),
        "benchmarks": lines("benchmarks"),
        "tools, hooks, template": lines("tools", "hooks", "{{cookiecutter.project_slug}}"),
    }
    over = []
    print(f"{'':24}{'lines':>8}{'cap':>8}{'target':>8}")
    for name, (cap, target) in {**WINGS, **FOLDERS}.items():
        print(f"{name:24}{counts[name]:8,}{cap:8,}{target:8,}{'  over' if counts[name] > cap else ''}")
        over += [name] if counts[name] > cap else []
    if over:
        print(f"Over the cap: {', '.join(over)}. Take lines away, or raise it in tools/size.py with the reason.")
    return bool(over)


if __name__ == "__main__":
    sys.exit(main())
