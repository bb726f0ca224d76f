"""cookiecutter runs this before it writes a file: names that can't work are refused, all at once, with a way out.

cookiecutter renders a hook and runs it by itself, away from the template: nothing of the template can be imported here.
"""

from __future__ import annotations

import json
import keyword
import re
import sys
from collections.abc import Mapping

ANSWERS = r"""{{ cookiecutter | tojson }}"""
"""Filled in by cookiecutter. ``tojson`` leaves no character that could end this text, whatever was answered."""

PACKAGE = re.compile(r"[a-z][a-z0-9_]{0,29}")
"""A longer name makes lines too long for the linter."""
SLUG = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,126}[A-Za-z0-9])?")
"""wandb takes 128 characters for the name of a project."""
ENTITY = re.compile(r"[A-Za-z0-9._-]*")
ONE_LINE = re.compile(r"[^\x00-\x1f\x7f\x85\u2028\u2029]*\S[^\x00-\x1f\x7f\x85\u2028\u2029]*")
TAKEN = {
    *(
        "benchmarks",
        "configs",
        "docs",
        "evaluate",
        "hydra_plugins",
        "src",
        "tests",
        "tools",
        "train",
        "tune",
        "unnamed",
    ),
    *("vendor", "wellfed", "workloads"),
    *("false", "null", "off", "on", "true"),
}
"""Names that the project itself uses, or that yaml reads as something else (workload=on)."""


def faults(answers: Mapping[str, object]) -> list[str]:
    """Returns a line for each fault of the answers: value, rule, way out; empty without a fault."""
    slug, package, entity = (str(answers[key]) for key in ("project_slug", "package_name", "wandb_entity"))
    found = [
        f"{key}={answers[key]!r}: it must be one line of text. Write it in one line."
        for key in ("project_name", "description", "author")
        if not ONE_LINE.fullmatch(str(answers[key]) or ("-" if key == "description" else ""))
    ]
    if not SLUG.fullmatch(slug) or re.sub(r"[-.]+", "_", slug).lower() in TAKEN:
        rule = (
            "1 to 128 letters a-z, digits, '-', '_', '.', with a letter or digit at both ends, and no folder of its own"
        )
        found.append(f"project_slug={slug!r}: {rule}. Take project_slug=my-nets.")
    is_taken = keyword.iskeyword(package) or package in sys.stdlib_module_names or package in TAKEN
    if not PACKAGE.fullmatch(package) or is_taken:
        rule = (
            "1 to 30 letters a-z, digits and '_', with a letter first, and no module of Python or folder of the project"
        )
        found.append(f"package_name={package!r}: {rule}. Take package_name=my_nets.")
    if not ENTITY.fullmatch(entity):
        rule = "a wandb user or team has letters a-z, digits, '-', '_' and '.' only"
        found.append(f"wandb_entity={entity!r}: {rule}. Leave it empty for wandb's default.")
    return found


if __name__ == "__main__":
    refused = faults(json.loads(ANSWERS))
    for fault in refused:
        print(f"refused: {fault}", file=sys.stderr)
    sys.exit(1 if refused else 0)
