"""Prints the lines of Python of each wing beside its cap, and fails where a wing is over it.

A cap is the number of lines, rounded up to 50; it falls with the work on its wing, to the target.
Nobody raises one without a sentence here that says why.

benchmarks was raised by 50 for the row of a guest beside Lightning alone, and by 50 for loops that take turns.
tests was raised by 50 for guards that came back: optimizers with a closure, defaultdicts in checkpoints.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENGINE = "src/wellfed"
WINGS = {
    # wing: (cap, target)
    "cli": (1700, 1700),
    "testing": (550, 480),
    "study": (6000, 4800),
    "run": (5600, 4200),
    "watch": (2500, 1700),
    "explain": (5650, 5300),
    "plan": (2800, 2500),
    "train": (5300, 4300),
    "observe": (4150, 3700),
    "data": (3300, 2700),
    "config": (3000, 2700),
    "core": (3100, 2700),
}
"""Wing of the engine -> cap and target, in lines."""
FOLDERS = {
    "engine": (43550, 38000),
    "src/workloads": (9450, 4800),
    "tests": (58750, 50000),
    "benchmarks": (6400, 6500),
    "tools, hooks, template": (1400, 1600),
}
"""Part of the repository -> cap and target, in lines."""


def lines(*folders: str) -> int:
    """Returns the number of lines of all Python files below the folders."""
    return sum(len(file.read_bytes().splitlines()) for folder in folders for file in (ROOT / folder).rglob("*.py"))


def main() -> int:
    """Prints the table; returns 1 where a cap is exceeded."""
    counts = {wing: lines(f"{ENGINE}/{wing}") for wing in WINGS if wing != "core"}
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
