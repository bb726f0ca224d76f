"""The public names: the page, the package, and who uses nothing else."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import wellfed
from wellfed.config.faults.target_faults import check_imported
from wellfed.config.schema import RunConfig

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "public_names.md").read_text(encoding="utf-8")
MODULES = re.findall(r"^\| `(wellfed\.[\w.]+)` \|", PAGE, flags=re.MULTILINE)
NEEDS_TORCH = {"GPUCurves", "SampleRng", "TransformersModel", "find_micro_batch", "from_transformers", "load_model"}
NEEDS_TORCH |= {"seed_from"}  # of the module of SampleRng
HEAVY = {"torch", "lightning", "pytorch_lightning", "hydra", "omegaconf", "transformers", "wandb", "numpy", "pandas"}


def test_the_page_lists_the_names_of_the_package():
    listed = re.findall(r"^\| `(\w+)` \|", PAGE, flags=re.MULTILINE)
    assert len(listed) > 20
    assert sorted(listed) == sorted(wellfed.__all__)


def test_a_checker_sees_the_same_names():
    """What mypy and editors read stands beside the table that is used at run time."""
    (typed,) = [
        node
        for node in ast.parse(inspect.getsource(wellfed)).body
        if isinstance(node, ast.If) and isinstance(node.body[0], ast.ImportFrom)
    ]
    found = {
        alias.asname: f"{node.module}.{alias.name}"
        for node in typed.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert found == {name: f"wellfed.{home}.{name}" for name, home in wellfed._HOMES.items()}


@pytest.mark.parametrize("name", wellfed.__all__)
def test_a_name_resolves_and_is_described(name: str):
    value = getattr(wellfed, name)
    assert not inspect.ismodule(value)
    assert name in dir(wellfed)
    if inspect.isclass(value) or inspect.isfunction(value):
        assert inspect.getdoc(value)


@pytest.mark.parametrize("module", MODULES)
def test_a_public_module_has_what_the_page_names(module: str):
    (row,) = re.findall(rf"^\| `{re.escape(module)}` \| (.*) \|", PAGE, flags=re.MULTILINE)
    found = importlib.import_module(module)
    assert [name for name in re.findall(r"`(\w+)`", row) if not hasattr(found, name)] == []


def test_a_name_that_is_none_is_refused_as_of_any_module():
    with pytest.raises(AttributeError, match="module 'wellfed' has no attribute 'Datsets'"):
        wellfed.Datsets  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Datsets' from 'wellfed'"):
        from wellfed import Datsets  # noqa: F401


def loaded_by(code: str) -> set[str]:
    """Those of the heavy packages that a fresh process has imported after the code."""
    code += "\nimport sys\nprint(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split()) & HEAVY


def test_importing_the_package_imports_nothing_heavy():
    assert loaded_by("import wellfed; dir(wellfed); wellfed.__version__") == set()


def test_names_without_need_of_torch_are_imported_without_it():
    names = sorted(set(wellfed.__all__) - NEEDS_TORCH)
    loaded = loaded_by(f"from wellfed import {', '.join(names)}")
    assert loaded & {"torch", "lightning", "pytorch_lightning", "hydra", "transformers", "wandb"} == set()


def test_the_contract_is_imported_with_nothing_heavy():
    assert loaded_by("from wellfed import Datasets, LossOutput, DataError, Fault, prepared") == set()


@pytest.mark.slow
def test_a_name_imports_no_more_than_it_needs():
    assert loaded_by("from wellfed import SampleRng") <= {"torch", "numpy"}


@pytest.mark.parametrize(
    "first", ["import wellfed.data.prepared", "from wellfed.data.prepared import digest", "import wellfed"]
)
def test_a_function_is_not_hidden_by_the_module_of_its_name(first: str):
    code = f"{first}\nfrom wellfed import prepared\nfrom wellfed.data.prepared import prepared as same\n"
    assert loaded_by(f"{code}assert prepared is same and prepared.__name__ == 'prepared'") == set()


@pytest.mark.slow
def test_all_names_can_be_imported_at_once():
    code = "from wellfed import *\nimport wellfed\nassert set(wellfed.__all__) <= set(globals())"
    assert "torch" in loaded_by(code)


def test_a_yaml_may_name_a_public_name_as_target():
    config = RunConfig()
    config.workload.data = {"_target_": "wellfed.Datasets", "train": []}
    config.workload.optimizer = None
    config.workload.model = {"_target_": "wellfed.from_transfomers"}
    (fault,) = check_imported(config)
    assert fault.problem == "wellfed has no from_transfomers."
    assert fault.way_out == "Did you mean workload.model._target_=wellfed.from_transformers?"


# -- who uses nothing else ------------------------------------------------------------------------------------------


def blocks() -> Iterator[tuple[str, str]]:
    """Python of the pages, with the page's name."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for block in re.findall(r"^```python[^\n]*\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
            yield page.name, block


FILES = [
    path
    for folder in ("src/workloads", "src/wellfed/cli/blank", "tests/blank")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


def not_public(code: str) -> list[str]:
    """What the code imports of wellfed beside public names and modules; a workload's own files are its own."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found += [each.name for each in node.names if each.name.startswith("wellfed.") and each.name not in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "wellfed":
            own = node.module == "wellfed" or node.module in MODULES
            public = {*wellfed.__all__, "__version__", *(each.removeprefix("wellfed.") for each in MODULES)}
            for alias in node.names:
                if not own or (node.module == "wellfed" and alias.name not in public):
                    found.append(f"{node.module}.{alias.name}")
    return [each for each in found if not each.startswith("wellfed.cli.blank.")]


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("from wellfed import Datasets, units\nfrom wellfed.units import counted\nimport wellfed.data.shards", []),
        ("from wellfed.contract import Datasets", ["wellfed.contract.Datasets"]),
        ("def f():\n    import wellfed.record", ["wellfed.record"]),
        ("from wellfed import record", ["wellfed.record"]),
        (
            "from wellfed.data.shards.write_shards import write_shards",
            ["wellfed.data.shards.write_shards.write_shards"],
        ),
    ],
)
def test_what_is_not_public_is_found(code: str, found: list[str]):
    assert not_public(code) == found


def test_workloads_import_public_names_alone():
    found = {path.relative_to(ROOT).as_posix(): not_public(path.read_text(encoding="utf-8")) for path in FILES}
    assert len(found) > 60
    assert {path: names for path, names in found.items() if names} == {}


def test_pages_import_public_names_alone():
    found = [(page, not_public(block)) for page, block in blocks()]
    assert len([page for page, block in blocks() if "wellfed import" in block]) > 8
    assert [entry for entry in found if entry[1]] == []
