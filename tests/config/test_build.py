"""Objects are built as ``hydra.utils.instantiate`` builds them; what refuses is told with its node and a way out."""

import functools
import sys
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra.utils
import pytest
from omegaconf import DictConfig, ListConfig, OmegaConf

from wellfed.config.build import build
from wellfed.config.compose import compose
from wellfed.config.faults.target_faults import import_fault
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


def builds_itself(net):
    return hydra.utils.instantiate(net)


def reads_width(cfg):
    return cfg.width


def converts(cfg):
    return OmegaConf.to_container(cfg)


HERE = "made_up_for_build"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    names = {one.__name__: one for one in (needs, builds_itself, reads_width, converts, Record)}
    monkeypatch.setitem(sys.modules, HERE, SimpleNamespace(**names))


def node(name: str = "needs", **given: Any) -> dict[str, Any]:
    return {"_target_": f"{HERE}.{name}", **given}


INNER = node(a=[1, {"x": 2}])
AS_HYDRA = {
    "convert none": node(_convert_="none", a={"x": [1]}, b=[2]),
    "convert partial": node(_convert_="partial", a={"x": [1]}, b=[2]),
    "convert object": node(_convert_="object", a={"x": [1]}, b=[2]),
    "convert all": node(_convert_="all", a={"x": [1]}, b=[2]),
    "convert of an inner node": node(_convert_="none", a=INNER | {"_convert_": "all"}, b=[3]),
    "not recursive": node(_convert_="none", _recursive_=False, a=INNER),
    "not recursive inside": node(_convert_="all", a=INNER | {"_recursive_": False, "b": node(a=1)}),
    "built by the target": node("builds_itself", _recursive_=False, net=INNER),
    "args": {"_target_": "fractions.Fraction", "_args_": [1, 3]},
    "object": node(a={"_target_": "hydra.utils.get_object", "path": "math.pi"}),
    "class": node(a={"_target_": "hydra.utils.get_class", "path": "fractions.Fraction"}),
    "method": node(a={"_target_": "hydra.utils.get_method", "path": "math.sqrt"}),
    "mapping of nodes": node(_convert_="all", a={"one": INNER, "two": INNER}),
}


def same(one: Any, other: Any) -> bool:
    """Whether two results are equal, with the same types of containers."""
    if type(one) is not type(other):
        return False
    if isinstance(one, SimpleNamespace):
        return same(vars(one), vars(other))
    if isinstance(one, (dict, DictConfig)):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, ListConfig)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("name", AS_HYDRA)
def test_a_node_with_hydras_keys_is_built_as_hydra_builds_it(name: str) -> None:
    assert same(build(AS_HYDRA[name], "workload.model"), hydra.utils.instantiate(AS_HYDRA[name]))


def test_values_are_plain_where_a_node_does_not_say_otherwise() -> None:
    made = build(node(a={"x": [1, {"y": 2}]}), "workload.data")
    assert same(made.a, {"x": [1, {"y": 2}]})
    assert not same(hydra.utils.instantiate(node(a={"x": []})).a, {"x": []})  # Hydra's default
    nested = build(node(_recursive_=False, a=node(a=[1])), "workload.data")
    assert same(nested.a, node(a=[1]))


def test_partial() -> None:
    made = build(node(_partial_=True, b=[3]), "workload.data")
    assert isinstance(made, functools.partial)
    assert same(made(1).b, [3])


def test_lists_of_nodes_and_mappings_of_them() -> None:
    one = {"_target_": "fractions.Fraction", "_args_": [1, 3]}
    assert build([one, one], "workload.metrics") == [Fraction(1, 3)] * 2
    assert build({"third": one}, "workload.metrics") == {"third": Fraction(1, 3)}


def test_what_is_handed_over_arrives_as_it_is() -> None:
    thing, record = Uncopyable(), Record(3)
    made = build(node(), "workload.data", thing, b=record)
    assert made.a is thing
    assert made.b is record
    assert build(node(a=1, b=5), "workload.model", b=7).b == 7


@pytest.mark.parametrize(
    ("given", "where", "problem", "way_out"),
    [
        (node(a="value"), "workload.data", "refuses its arguments: a must not be 'value' (", "Change"),
        (node(), "workload.data", "missing 1 required positional argument: 'a'", "Add +workload.data.a=<value>"),
        (node(a=1, c=2), "workload.data", "unexpected keyword argument 'c'", "Change"),
        (node(a=node(a="value")), "workload.data.a", "must not be 'value'", "Change workload.data.a.*"),
        (node("nope"), f"workload.data._target_={HERE}.nope", "has no nope", "Name a class"),
        (node("nedes"), f"workload.data._target_={HERE}.nedes", "has no nedes", f"_target_={HERE}.needs?"),
        ({"_target_": "no_such.f"}, "workload.data._target_=no_such.f", "No module named 'no_such'", "on the path"),
        ({"_target_": "math.pi"}, "workload.data", "Expected a callable target", "Change"),
        (node(_args_=3), "workload.data", "Unsupported _args_ type", "Change"),
        (node(_recursive_=3), "workload.data", "must be a bool", "Change"),
        (node("reads_width", cfg={"width": 3}), "workload.data", "no attribute 'width'", "+workload.data._convert_="),
        (node("converts", cfg={"width": 3}), "workload.data", "OmegaConf config object", "_convert_=none"),
        (node(a="value", b="64"), "workload.data", "must not be", "workload.data.b is the text '64': write 64"),
    ],
)  # fmt: skip
def test_faults_name_the_node_and_a_way_out(given: Any, where: str, problem: str, way_out: str) -> None:
    with pytest.raises(ConfigError) as raised:
        build(given, "workload.data")
    (fault,) = raised.value.faults
    assert fault.where == where
    assert problem in fault.problem
    assert way_out in fault.way_out


def test_a_refusal_names_the_line_of_the_users_code() -> None:
    with pytest.raises(ConfigError, match=rf"{Path(__file__).name}:\d+"):
        build(node(a="value"), "workload.data")


def test_the_text_of_a_variable_is_told_with_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WIDTH", "64")
    composed = compose(["+workload.data.b=${oc.env:WIDTH}"])
    with composed.without_folder() as inside, pytest.raises(ConfigError) as raised:
        build(node(a="value", b=inside.config.workload.data["b"]), "workload.data")
    assert "the text '64', by ${oc.env:WIDTH}; oc.env gives text" in str(raised.value)
    assert "Write ${oc.decode:${oc.env:WIDTH}}" in str(raised.value)


@pytest.mark.parametrize(("a", "error"), [("data", DataError), ("key", KeyError)])
def test_other_errors_of_the_code_pass_through(a: str, error: type[Exception]) -> None:
    with pytest.raises(error) as raised:
        build(node(a=node(a=a)), "workload.data")
    assert raised.value.__context__ is None
    assert raised.traceback[-1].name == "needs"


def test_a_missing_package_inside_the_target_is_named() -> None:
    fault = import_fault("workload.model", "mine.Model", ModuleNotFoundError("No module named 'timm'", name="timm"))
    assert fault.problem == "needs the package timm, which is not installed."
    assert fault.way_out == "Install it: python -m pip install timm."


def test_a_folder_without_an_init_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bare_package" / "inner").mkdir(parents=True)
    (tmp_path / "bare_package" / "__init__.py").write_text("")
    (tmp_path / "bare_package" / "inner" / "data.py").write_text("def rows():\n    return 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert build({"_target_": "bare_package.inner.data.rows"}, "workload.data") == 3
    with pytest.raises(ConfigError, match=r"bare_package\.inner"):
        build({"_target_": "bare_package.inner.model.Net"}, "workload.model")
