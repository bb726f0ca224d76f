import functools
from dataclasses import dataclass
from fractions import Fraction
from types import SimpleNamespace

import pytest

from wellfed.config.build import build, import_fault, locate
from wellfed.errors import ConfigError, DataError


@dataclass
class Record:
    """A dataclass, which Hydra's instantiate would take for a configuration."""

    value: int


class Uncopyable:
    def __deepcopy__(self, memo):
        raise AssertionError("copied")


def needs(a, b=2):
    if a == "value":
        raise ValueError("a must not be 'value'")
    if a == "data":
        raise DataError("file.csv is empty")
    if a == "key":
        raise KeyError(a)
    return SimpleNamespace(a=a, b=b)


HERE = "made_up_for_build"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    module = SimpleNamespace(needs=needs, Record=Record)
    monkeypatch.setitem(__import__("sys").modules, HERE, module)


def test_calls_the_target_with_plain_values():
    made = build({"_target_": f"{HERE}.needs", "a": {"x": [1, {"y": 2}]}}, "workload.data")
    assert made.a == {"x": [1, {"y": 2}]}
    assert made.b == 2


def test_what_is_handed_over_arrives_as_it_is():
    thing, record = Uncopyable(), Record(3)
    made = build({"_target_": f"{HERE}.needs"}, "workload.data", thing, b=record)
    assert made.a is thing
    assert made.b is record


def test_runtime_arguments_win():
    assert build({"_target_": f"{HERE}.needs", "a": 1, "b": 5}, "workload.model", b=7).b == 7


def test_nested_nodes_are_built_first():
    node = {"_target_": f"{HERE}.needs", "a": [{"_target_": "fractions.Fraction", "_args_": [1, 3]}], "b": {"c": {}}}
    node["b"]["c"] = {"_target_": f"{HERE}.Record", "value": 4}
    made = build(node, "workload.data")
    assert made.a == [Fraction(1, 3)]
    assert made.b == {"c": Record(4)}


def test_partial():
    made = build({"_target_": f"{HERE}.needs", "_partial_": True, "b": 3}, "workload.data")
    assert isinstance(made, functools.partial)
    assert made(1).b == 3


@pytest.mark.parametrize(
    ("node", "where", "words"),
    [
        ({"a": 1}, "workload.data", "names nothing to build"),
        ({"_target_": f"{HERE}.needs", "a": "value"}, "workload.data", "refuses its arguments: a must not be 'value'"),
        ({"_target_": f"{HERE}.needs"}, "workload.data", "missing 1 required positional argument: 'a'"),
        ({"_target_": f"{HERE}.nope"}, f"workload.data._target_={HERE}.nope", "has no nope"),
        ({"_target_": "no_such_pkg.f"}, "workload.data._target_=no_such_pkg.f", "No module named 'no_such_pkg'"),
        (
            {"_target_": f"{HERE}.needs", "a": {"_target_": f"{HERE}.needs", "a": "value"}},
            "workload.data.a",
            "must not be 'value'",
        ),
    ],
)
def test_faults_name_the_node(node, where, words):
    with pytest.raises(ConfigError) as raised:
        build(node, "workload.data")
    (fault,) = raised.value.faults
    assert fault.where == where
    assert words in fault.problem
    assert fault.way_out


def test_our_own_errors_pass_through():
    with pytest.raises(DataError, match=r"file\.csv is empty"):
        build({"_target_": f"{HERE}.needs", "a": "data"}, "workload.data")


def test_errors_in_the_code_keep_their_traceback():
    with pytest.raises(KeyError):
        build({"_target_": f"{HERE}.needs", "a": "key"}, "workload.data")


def test_locate_imports_submodules_and_attributes():
    assert locate("importlib.machinery.PathFinder").__name__ == "PathFinder"
    assert locate("fractions.Fraction.limit_denominator") is Fraction.limit_denominator
    with pytest.raises(ImportError, match=r"fractions\.Fraction has no Nope"):
        locate("fractions.Fraction.Nope")


def test_a_missing_package_inside_the_target_is_named():
    fault = import_fault("workload.model", "mine.Model", ModuleNotFoundError("No module named 'timm'", name="timm"))
    assert fault.problem == "needs the package timm, which is not installed."
    assert fault.way_out == "Install it: python -m pip install timm."


def test_a_folder_without_an_init_file_is_found(tmp_path, monkeypatch):
    (tmp_path / "bare_package" / "inner").mkdir(parents=True)
    (tmp_path / "bare_package" / "__init__.py").write_text("")
    (tmp_path / "bare_package" / "inner" / "data.py").write_text("def rows():\n    return 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert build({"_target_": "bare_package.inner.data.rows"}, "workload.data") == 3
    with pytest.raises(ConfigError, match="bare_package.inner"):
        build({"_target_": "bare_package.inner.model.Net"}, "workload.model")
