"""Maps each optional package to the extra that installs it, and to its purpose.

``docs/dependencies.md`` lists packages, sizes and extras.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

PACKAGES: Mapping[str, tuple[str, str]] = {
    "transformers": ("hf", "models of Hugging Face"),
    "peft": ("hf", "LoRA adapters"),
    "safetensors": ("hf", "weights of Hugging Face"),
    "soundfile": ("audio", "sound files other than 16-bit wav"),
    "pandas": ("tables", "tables in CSV and TSV files"),
    "scipy": ("mat", ".mat files"),
    "PIL": ("images", "pillow: image files"),
    "pytest": ("testing", "tests of workloads"),
    "optuna": ("search", "searches that choose their values"),
    "tensorboard": ("tensorboard", "event files of TensorBoard"),
    "mlflow": ("mlflow", "runs in mlflow"),
}
"""Import name -> extra of wellfed, and what needs the package."""


def is_installed(package: str) -> bool:
    """Returns whether a package is installed, without importing it."""
    return find_spec(package) is not None


def absent_package(error: ModuleNotFoundError) -> str | None:
    """Returns the optional package that an import failed to find; None if another module was missing."""
    package = (error.name or "").partition(".")[0]
    return package if package in PACKAGES and not is_installed(package) else None


def install(extra: str) -> str:
    """Returns the command that installs an extra, for a wheel or a clone."""
    return f"python -m pip install 'wellfed[{extra}]'"


def absence(package: str) -> tuple[str, str]:
    """Returns problem and way out for a package that is not installed."""
    if package not in PACKAGES:
        return f"needs the package {package}, which is not installed.", f"Install it: python -m pip install {package}."
    extra, purpose = PACKAGES[package]
    return f"needs the package {package} ({purpose}), which is not installed.", f"Install it: {install(extra)}."


def other_lightning(kind: type, base: str) -> tuple[str, str] | None:
    """Returns problem and way out for a class that inherits from pytorch_lightning; None for all other classes."""
    if not any(f"{each.__module__}.{each.__name__}".startswith("pytorch_lightning.") for each in kind.__mro__):
        return None
    problem = f"{kind.__qualname__} is a {base} of pytorch_lightning, and this is run by lightning.pytorch."
    return problem, "In its file, write lightning.pytorch for pytorch_lightning: import lightning.pytorch as pl"
