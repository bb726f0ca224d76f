"""cookiecutter runs this before it writes a file: names that can't work are refused, all at once, with a way out.

`make new` asks the same `faults` (tools/scaffold.py). cookiecutter renders a hook and runs it by itself, away from the
template: nothing of the template can be imported here.
"""

from __future__ import annotations

import json
import keyword
import re
import sys
from collections.abc import Mapping

ANSWERS = r"""{{ cookiecutter | tojson }}"""
"""Filled in by cookiecutter. ``tojson`` leaves no character that could end this text, whatever was answered."""

PACKAGE = re.compile(r"[a-z][a-z0-9_]*")
LONGEST_PACKAGE, LONGEST_COPY = 60, 30
"""Characters of a package, and of one that starts as a copy of an example: more make lines too long for the linter."""
SLUG = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
LONGEST_SLUG = 128
"""Characters that wandb takes for the name of a project."""
ENTITY = re.compile(r"[A-Za-z0-9._-]*")
CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")

PROJECT = {
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
    "vendor",
    "wellfed",
    "workloads",
}
"""Names that the project itself uses."""
EXAMPLES = {"forecast", "hyperspectral", "recsys", "restoration", "speech"}
"""The folders of src/workloads/ in the template."""
LIBRARIES = {
    "check_jsonschema", "cloudpickle", "filelock", "huggingface_hub", "hydra", "hypothesis", "importlinter",
    "jinja2", "lightning", "markupsafe", "matplotlib", "mypy", "numpy", "omegaconf", "optuna", "pandas", "peft",
    "pil", "PIL", "prometheus_client", "psutil", "pynvml", "pytest", "pytorch_lightning", "ray", "rich", "ruff",
    "safetensors", "scipy",
    "soundfile", "submitit", "threadpoolctl", "tokenizers", "torch", "torchmetrics", "transformers", "uv", "wandb",
    "xdist", "yaml", "zensical",
}  # fmt: skip
"""What the project imports or runs: a package of that name would hide it, or be hidden."""
DISTRIBUTIONS = LIBRARIES | {
    "hydra_core", "import_linter", "nvidia_ml_py", "pillow", "pip", "pre_commit", "pytest_xdist", "pyyaml",
    "setuptools",
}  # fmt: skip
"""What pip knows these by: a project of that name would take its place."""
WORDS = {"false", "inf", "n", "nan", "no", "none", "null", "off", "on", "true", "y", "yes"}
"""What yaml or Hydra read as something else than a name (workload=on)."""
DEVICES = {"aux", "con", "nul", "prn", *(f"{port}{number}" for port in ("com", "lpt") for number in range(10))}
"""No file can have these names on Windows."""


def faults(answers: Mapping[str, object]) -> list[str]:
    """Returns a line for each fault of the answers: value, rule, way out; empty without a fault."""
    found = [
        f"{key}={answers[key]!r}: it must be one line without control characters. Write it in one line."
        for key in ("project_name", "description", "author")
        if CONTROL.search(str(answers[key]))
    ]
    for key, suggestion in (("project_name", "My Nets"), ("author", "your name")):
        if not str(answers[key]).strip():
            found.append(f'{key}={answers[key]!r}: it must not be empty. Write {key}="{suggestion}".')
    if str(answers["project_name"]).strip():  # else the other names, which follow from it, are no fault of their own
        found += _slug_faults(str(answers["project_slug"]))
        found += _package_faults(str(answers["package_name"]), str(answers["workload"]))
    entity = str(answers["wandb_entity"])
    if not ENTITY.fullmatch(entity):
        rule = "a wandb user or team has letters a-z, digits, '-', '_' and '.' only"
        found.append(f"wandb_entity={entity!r}: {rule}. Leave it empty for wandb's default.")
    return found


def _slug_faults(slug: str) -> list[str]:
    plain = re.sub(r"[-.]+", "_", slug).lower()
    if not SLUG.fullmatch(slug):
        rule = "letters a-z, digits, '-', '_', '.', with a letter or digit at both ends"
    elif len(slug) > LONGEST_SLUG:
        rule = f"it has {len(slug)} characters, and wandb takes {LONGEST_SLUG} for the name of a project"
    elif slug == "unnamed":  # cookiecutter.json's stand-in: an empty name would be the folder that one stands in
        return ["project_slug='': the project's name has no letter or digit for it. Take project_slug=my-nets."]
    elif plain in DISTRIBUTIONS | PROJECT:
        rule = "a project of this name would take the place of something that it is made of"
    elif plain in DEVICES:
        rule = "Windows can't have a folder of this name"
    else:
        return []
    return [f"project_slug={slug!r}: {rule}. Take project_slug={_other(slug, '-')}."]


def _package_faults(package: str, workload: str) -> list[str]:
    longest = LONGEST_COPY if workload in EXAMPLES else LONGEST_PACKAGE
    if not PACKAGE.fullmatch(package):
        rule = "letters a-z, digits and '_', with a letter first"
    elif len(package) > longest:
        rule = f"it has {len(package)} characters, and {longest} is the most"
        rule += f" for a copy of {workload}" if workload in EXAMPLES else ""
    elif keyword.iskeyword(package):
        rule = "it is a keyword of Python"
    elif package in sys.stdlib_module_names:
        rule = "it is a module of Python's standard library"
    elif package in LIBRARIES | DISTRIBUTIONS:
        rule = "it is a library that the project uses"
    elif package in PROJECT:
        rule = "the project itself uses this name"
    elif package in WORDS | DEVICES:
        rule = "yaml, Hydra or Windows read it as something else than a name"
    else:
        return []
    return [f"package_name={package!r}: {rule}. Take package_name={_other(package, '_')}."]


def _other(name: str, joint: str) -> str:
    """Returns a name close to ``name`` that no rule refuses."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    shortened = joint.join(["my", *words] if words else ["my", "nets"])[:30].strip(joint)
    return shortened if len(shortened) > len("my_") else joint.join(["my", "nets"])


if __name__ == "__main__":
    refused = faults(json.loads(ANSWERS))
    for fault in refused:
        print(f"refused: {fault}", file=sys.stderr)
    sys.exit(1 if refused else 0)
