"""Every import of the code is of a base dependency, or of an extra that the table of optional packages names."""

import ast
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from wellfed.extras import PACKAGES, absence, absent_package, install, is_installed

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
OURS = {"wellfed", "workloads", "hydra_plugins"}
DISTRIBUTIONS = {
    "yaml": "pyyaml",
    "pynvml": "nvidia-ml-py",
    "hydra": "hydra-core",
    "PIL": "pillow",
}
"""Import names that differ from the name for pip."""

ASKED_FOR = {"torchvision", "timm"}
"""Either serves workload.model.perceptual=vgg, which names both; no extra installs them."""


def normal(requirement: str) -> str:
    return re.split(r"[\[<>=!~;( ]", requirement)[0].lower().replace("_", "-")


BASE = {normal(entry) for entry in PROJECT["dependencies"]}


def of_extra(name: str) -> set[str]:
    """The distributions that an extra asks for, those of extras in it too."""
    found = set()
    for entry in EXTRAS[name]:
        inner = re.fullmatch(r"wellfed\[(.*)\]", entry)
        found |= set().union(*map(of_extra, inner[1].split(","))) if inner else {normal(entry)}
    return found


def imports(source: str) -> Iterator[str]:
    """Yields every module that the source imports, by statement or by a literal name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "."
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
            yield from (argument.value for argument in node.args if isinstance(argument, ast.Constant))


@cache
def foreign(folder: str) -> dict[str, set[str]]:
    """Foreign packages that the files below a folder import anywhere, for types too -> the files."""
    found = defaultdict(set)
    for path in sorted((SRC / folder).rglob("*.py")):
        for name in imports(path.read_text(encoding="utf-8")):
            package = name.partition(".")[0]
            if package not in OURS | sys.stdlib_module_names:
                found[package].add(path.relative_to(SRC).as_posix())
    return found


@pytest.mark.parametrize("folder", ["wellfed", "hydra_plugins", "workloads"])
def test_every_import_is_of_a_base_dependency_or_of_an_extra(folder: str):
    found = foreign(folder)
    assert found
    for package, files in found.items():
        if package in ASKED_FOR:
            continue
        base = DISTRIBUTIONS.get(package, package) in BASE
        assert base != (package in PACKAGES), f"{package} in {files}: name it in dependencies, or in wellfed.extras"


def test_the_engine_needs_no_package_of_an_example():
    assert foreign("wellfed").keys() & PACKAGES.keys() == {"optuna", "pytest", "PIL"}


def test_every_base_dependency_is_imported():
    used = foreign("wellfed").keys() | foreign("hydra_plugins").keys()
    assert {DISTRIBUTIONS.get(package, package) for package in used if package not in PACKAGES} == BASE


@pytest.mark.parametrize("package", PACKAGES)
def test_the_named_extra_installs_the_package(package: str):
    wanted = DISTRIBUTIONS.get(package, package)
    found = of_extra(PACKAGES[package][0])
    assert {wanted, f"{wanted}-skinny"} & found, f"{PACKAGES[package][0]} installs {found}"


def test_the_examples_extra_has_all_that_the_examples_import():
    optional = foreign("workloads").keys() & PACKAGES.keys()
    assert {DISTRIBUTIONS.get(package, package) for package in optional} <= of_extra("examples")
    assert of_extra("examples") | of_extra("testing") <= of_extra("dev")


def test_no_package_of_an_extra_is_a_base_dependency_too():
    for extra in ("hf", "audio", "tables", "mat", "images", "search"):
        assert of_extra(extra)
        assert not of_extra(extra) & BASE


def test_what_pip_was_told_is_what_pyproject_says():
    """`pip install 'wellfed[hf]'` reads the installed metadata: an old one would not know the extra."""
    provided = importlib.metadata.metadata("wellfed").get_all("Provides-Extra") or []
    assert {extra for extra, _ in PACKAGES.values()} <= set(provided)


def test_only_what_needs_an_optional_package_imports_it_at_once():
    """Where it is imported within functions, its absence is a message."""
    found = set()
    for path in sorted((SRC / "wellfed").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        outermost = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom | ast.Try)]
        names = {name for node in outermost for name in imports(ast.unparse(node))}
        if {name.partition(".")[0] for name in names} & PACKAGES.keys():
            found.add(path.relative_to(SRC / "wellfed").as_posix())
    assert {path for path in found if not path.startswith("testing/")} == {
        "study/search/asked_points.py",
    }


@pytest.mark.slow  # as above, with what their own packages import
def test_the_engine_is_imported_without_any_optional_package():
    """All modules but search.study, whose absence is a message before it is imported, and the tests of workloads."""
    files = [path.relative_to(SRC).with_suffix("") for path in sorted((SRC / "wellfed").rglob("*.py"))]
    names = [".".join(file.parts).removesuffix(".__init__") for file in files if file.name != "__main__"]
    names = [name for name in names if not name.startswith("wellfed.testing")]
    assert len(names) > 200
    code = f"""
import importlib, sys
import lightning.pytorch  # torchmetrics imports what pip has installed of them, hidden or not
for name in [*{list(PACKAGES)}, *sys.modules]:
    if name.partition(".")[0] in {list(PACKAGES)}:
        sys.modules[name] = None
for name in {names}:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        print(name, error.name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    lacking = dict(line.split() for line in done.stdout.splitlines())
    assert lacking == {
        "wellfed.study.search.asked_points": "optuna",
    }, done.stderr


def test_a_package_is_looked_for_without_importing_it(monkeypatch: pytest.MonkeyPatch):
    assert is_installed("torch")
    assert not is_installed("no_such_package_at_all")
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert not is_installed("pandas")


def test_only_an_optional_package_that_is_not_there_counts_as_absent(monkeypatch: pytest.MonkeyPatch):
    def lacked(name: str) -> str | None:
        return absent_package(ModuleNotFoundError(name=name))

    monkeypatch.setitem(sys.modules, "transformers", None)
    assert lacked("transformers") == lacked("transformers.models.gpt2") == "transformers"
    assert lacked("rich.no_such_part") is None
    assert lacked("PIL.no_such_part") is None  # installed, and older than what it is asked for
    assert absent_package(ModuleNotFoundError("raised by hand")) is None


def test_a_missing_package_is_told_with_its_purpose_and_the_command():
    assert install("hf") == "python -m pip install 'wellfed[hf]'"
    assert absence("soundfile") == (
        "needs the package soundfile (sound files other than 16-bit wav), which is not installed.",
        "Install it: python -m pip install 'wellfed[audio]'.",
    )
    assert absence("timm") == (
        "needs the package timm, which is not installed.",
        "Install it: python -m pip install timm.",
    )


def test_commands_that_are_typed_in_texts_name_extras_that_are_there():
    found = 0
    for path in [*SRC.rglob("*.py"), *SRC.rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for names in re.findall(r"wellfed\[([a-z_,]+)\]", path.read_text(encoding="utf-8")):
            found += 1
            assert set(names.split(",")) <= EXTRAS.keys(), f"{path}: {names}"
    assert found > 5


def rows(head: str) -> dict[str, list[str]]:
    """A table of docs/dependencies.md: first cell -> the others."""
    text = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    (found,) = re.findall(rf"^\| {head} \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, flags=re.MULTILINE)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in found.splitlines()]
    return {first.strip("`"): others for first, *others in cells}


def test_the_page_lists_every_dependency_with_the_size_of_the_record():
    (*_, newest) = sorted((ROOT / "benchmarks" / "records").glob("*_dependency_sizes_cpu.json"))
    record = json.loads(newest.read_text(encoding="utf-8"))
    sizes = {
        each["package"]: [f"{each['own_mib']:.1f}", f"{each['saved_without_it_mib']:.1f}"]
        for each in record["packages"]
    }
    assert {name: cells[1:] for name, cells in rows("package").items()} == sizes
    assert sizes.keys() == BASE
    totals = {each["installed"]: each for each in record["results"]}
    base = totals["wellfed"]
    added = {name: f"{totals[f'wellfed[{name}]']['total_mib'] - base['total_mib']:.1f}" for name in rows("extra")}
    assert {name: cells[1] for name, cells in rows("extra").items()} == added
    assert rows("extra").keys() == {"ray", "slurm", *(extra for extra, _ in PACKAGES.values())}
    for name, cells in rows("extra").items():
        assert set(re.findall(r"`([^`]+)`", cells[0])) == of_extra(name)
    assert list(rows("installed").values()) == [
        [f"{each['num_distributions']}", f"{each['without_torch_mib']:.0f}", f"{each['total_mib']:,.0f}"]
        for each in (base, totals["wellfed[examples,plots]"])
    ]
