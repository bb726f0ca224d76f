"""What is installed and loaded from elsewhere: licences, wheels, weights-only checkpoints."""

import ast
import re
import tomllib
from importlib.metadata import Distribution, PackageNotFoundError, distribution, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tools.licences import EXCEPTIONS, is_allowed, licence_of, refused

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "tools").glob("*.py"), *(ROOT / "benchmarks").glob("*.py")])
BENCHMARKS = ("bench", "dev", "guests")
"""Extras that no run needs."""


@pytest.mark.parametrize(
    ("licence", "allowed"),
    [
        ("MIT", True),
        ("BSD-3-Clause AND MIT", True),
        ("Apache-2.0 OR GPL-2.0", True),
        ("GPL-3.0-only", False),
        ("GNU General Public License v3 (GPLv3)", False),
        ("Apache Software License, GNU General Public License v3 (GPLv3)", False),
        ("GNU Lesser General Public License v2 (LGPLv2)", True),
        ("AGPL-3.0", False),
        ("Free for non-commercial use", False),
        ("", False),
    ],
)
def test_licences(licence: str, allowed: bool) -> None:
    assert is_allowed(licence) == allowed


NVIDIA = "Classifier: License :: Other/Proprietary License\n"


@pytest.mark.parametrize(
    ("name", "fields", "licence"),
    [
        ("nvidia-cublas", f"{NVIDIA}License: LicenseRef-NVIDIA-Proprietary\n", "LicenseRef-NVIDIA-Proprietary"),
        ("nvidia-cudnn", f"License: NVIDIA Proprietary Software\n{NVIDIA}", "NVIDIA Proprietary Software"),
        ("nvidia-nccl", "License-Expression: BSD-3-Clause\n", "BSD-3-Clause"),
        ("cuda-toolkit", "", ""),
        ("triton", "License: see LICENSE\nClassifier: License :: OSI Approved :: MIT License\n", "MIT License"),
    ],
)
def test_packages_of_a_torch_for_cuda_may_be_used(tmp_path: Path, name: str, fields: str, licence: str) -> None:
    package = described(tmp_path, name, fields)
    assert licence_of(package) == licence
    assert refused([package]) == []


@pytest.mark.parametrize(
    "fields",
    [NVIDIA, f"{NVIDIA}License: Commercial\n", f"{NVIDIA}Classifier: License :: OSI Approved :: GPLv3\nLicense: MIT\n"],
)
def test_other_proprietary_packages_are_refused(tmp_path: Path, fields: str) -> None:
    assert len(refused([described(tmp_path, "x", fields)])) == 1


def described(folder: Path, name: str, fields: str) -> Distribution:
    """Returns a package with this metadata."""
    path = folder / f"{name}-1.0.dist-info"
    path.mkdir()
    (path / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{fields}\n")
    return Distribution.at(path)


def needed_by_runs() -> set[str]:
    """Returns the installed packages that a run needs, with all extras but those of benchmarks and development."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(text for name in extras if name not in BENCHMARKS for text in extras[name])]
    found: set[str] = set()
    left = [Requirement(text) for text in wanted]
    while left:
        asked = left.pop()
        name = asked.name.lower()
        if name in found or name == "wellfed" or (asked.marker and not asked.marker.evaluate({"extra": ""})):
            continue
        try:
            left += [Requirement(text) for text in requires(name) or ()]
        except PackageNotFoundError:  # of an extra that is not installed here
            continue
        found.add(name)
    return found


def test_all_that_a_run_needs_has_a_licence_that_is_allowed() -> None:
    found = needed_by_runs()
    assert {"torch", "lightning", "wandb", "hydra-core", "numpy"} <= found
    assert not found & {name for name, why in EXCEPTIONS.items() if "benchmarks" in why}
    assert refused(distribution(name) for name in found) == []


def calls(name: str) -> list[tuple[Path, ast.Call]]:
    """Returns the calls of a function of a module, such as ``torch.load``."""
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCES}
    return [
        (path, node)
        for path, text in texts.items()
        if name in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == name
    ]


def keyword(call: ast.Call, name: str) -> str | None:
    found = {each.arg: ast.unparse(each.value) for each in call.keywords}
    return found.get(name)


def test_checkpoints_are_loaded_weights_only_everywhere() -> None:
    loads = calls("torch.load")
    assert len(loads) >= 6
    assert [path.name for path, call in loads if keyword(call, "weights_only") != "True"] == []
    assert not calls("torch.jit.load") + calls("torch.package.PackageImporter")


def test_arrays_and_options_are_read_without_objects() -> None:
    loads = calls("np.load")
    assert loads
    assert all(keyword(call, "allow_pickle") in (None, "False") for _, call in loads)
    assert not calls("yaml.load") + calls("yaml.unsafe_load") + calls("yaml.full_load")


PICKLES = {
    "plan/predict/forked_estimate.py",
    "data/backends/shared_blocks.py",
    "data/backends/process_backend.py",
    "run/ranks/following.py",
    "run/ranks/exchange.py",
    "study/executors/remote.py",
    "testing/workload_contract.py",
}
"""Files that unpickle what another process of the same run has sent: SECURITY.md, "What is trusted"."""


def test_only_messages_between_the_processes_of_a_run_are_pickles() -> None:
    found = {path.relative_to(ROOT).as_posix() for name in ("load", "loads") for path, _ in calls(f"pickle.{name}")}
    assert {path.removeprefix("src/wellfed/") for path in found if path.startswith("src/")} == PICKLES


@pytest.mark.parametrize("path", ["Makefile", "{{cookiecutter.project_slug}}/Makefile"])
def test_make_asks_for_wheels_but_for_one_package(path: str) -> None:
    """tests/template/test_hashes.py installs with the second of them."""
    text = (ROOT / path).read_text(encoding="utf-8")
    (wheels,) = re.findall(r"^WHEELS = (.*)$", text, flags=re.MULTILINE)
    assert wheels == "--only-binary :all:"
    (pip,) = re.findall(r"^PIP = (.*)$", text, flags=re.MULTILINE)
    assert "$(WHEELS)" in pip
    (line,) = re.findall(r"^\t(.*--only-binary :none:.*)$", text, flags=re.MULTILINE)
    assert "antlr4-python3-runtime" in line
    assert "antlr4-python3-runtime" in (ROOT / "SECURITY.md").read_text(encoding="utf-8")
