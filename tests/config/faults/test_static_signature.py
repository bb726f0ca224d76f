"""Static signatures against ``inspect.signature`` of the same code, imported."""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
from inspect import Parameter, Signature
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wellfed.config.faults.static_signature import NotThere, Unread, signature_of
from wellfed.config.faults.target_faults import bind

NAMES = ("a", "b", "c", "d", "e")
FRESH = count()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A function that writes modules of a new package and returns its name."""
    name = f"made_up_{next(FRESH)}"
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(files: dict[str, str]) -> str:
        for path, text in files.items():
            file = tmp_path / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(textwrap.dedent(text).replace("PACKAGE", name))
        importlib.invalidate_caches()
        return name

    yield write
    for module in [m for m in sys.modules if m.partition(".")[0] == name]:
        del sys.modules[module]


def shape(signature: Signature) -> list[tuple[str, object, bool]]:
    return [(p.name, p.kind, p.default is Parameter.empty) for p in signature.parameters.values()]


def imported(target: str) -> Signature:
    module, _, name = target.rpartition(".")
    return inspect.signature(getattr(importlib.import_module(module), name))


def read(target: str) -> Signature:
    return signature_of(target, [target.partition(".")[0]])


@st.composite
def parameter_lists(draw):
    """Source of a parameter list that Python accepts."""
    names = list(draw(st.permutations(NAMES)))[: draw(st.integers(0, len(NAMES)))]
    cuts = sorted(draw(st.lists(st.integers(0, len(names)), min_size=3, max_size=3)))
    positional_only, plain, keyword = names[: cuts[0]], names[cuts[0] : cuts[2]], names[cuts[2] :]
    first_default = draw(st.integers(0, cuts[2]))
    parts = [n + ("=1" if i >= first_default else "") for i, n in enumerate([*positional_only, *plain])]
    if positional_only:
        parts.insert(len(positional_only), "/")
    star = draw(st.sampled_from(["", "*args"]))
    if star:
        parts.append(star)
    elif keyword:
        parts.append("*")
    parts += [n + draw(st.sampled_from(["", "=None"])) for n in keyword]
    if draw(st.booleans()):
        parts.append("**rest")
    return ", ".join(parts)


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    parameters=parameter_lists(),
    given_names=st.sets(st.sampled_from([*NAMES, "f"])),
    num_positional=st.integers(0, 6),
    as_class=st.booleans(),
)
def test_binds_exactly_when_python_does(tmp_path, parameters, given_names, num_positional, as_class):
    name = f"drawn_{next(FRESH)}"
    body = f"class f:\n    def __init__(self, {parameters}): pass\n" if as_class else f"def f({parameters}): pass\n"
    (tmp_path / f"{name}.py").write_text(body)
    sys.path.insert(0, str(tmp_path))
    try:
        importlib.invalidate_caches()
        static = read(f"{name}.f")
        real = imported(f"{name}.f")
        call = importlib.import_module(name).f
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop(name, None)
    assert shape(static) == shape(real)
    node = {"_target_": f"{name}.f", "_args_": [0] * num_positional, **dict.fromkeys(given_names, 1)}
    faults = bind("workload.data", node, static)
    try:
        call(*[0] * num_positional, **dict.fromkeys(given_names, 1))
    except TypeError:
        assert faults
    else:
        assert faults == []


def test_dataclasses(package):
    name = package(
        {
            "__init__.py": "",
            "base.py": """
                from dataclasses import dataclass, field, KW_ONLY, InitVar
                from typing import ClassVar
                @dataclass
                class Base:
                    a: int
                    b: int = 1
                    hidden: int = field(default=3, init=False)
                    shared: ClassVar[int] = 3
                    def method(self): ...
                """,
            "more.py": """
                import dataclasses
                from dataclasses import dataclass, field, KW_ONLY, InitVar
                from PACKAGE.base import Base
                from . import base
                @dataclass(frozen=True, kw_only=True)
                class KeywordOnly:
                    c: int
                    d: list[int] = field(default_factory=list)
                @dataclass
                class Child(Base):
                    b: int = 5
                    seed: InitVar[int] = 1
                    _: KW_ONLY
                    e: int = dataclasses.field(kw_only=True)
                    f: int = 3
                @dataclasses.dataclass
                class Dotted(base.Base):
                    z: int = field(default=1, kw_only=True)
                class Inherits(Child):
                    extra = 3
                class Plain:
                    def __init__(self, own, *, more=2): ...
                @dataclass
                class Both(Child, Plain):
                    more: int = 3
                @dataclass
                class Written:
                    y: int
                    def __init__(self, other): ...
                @dataclass
                class Below(Written):
                    z: list = field(default_factory=list)
                """,
        }
    )
    classes = ["KeywordOnly", "Child", "Dotted", "Inherits", "Both", "Written", "Below"]
    for target in ("base.Base", *(f"more.{one}" for one in classes)):
        assert shape(read(f"{name}.{target}")) == shape(imported(f"{name}.{target}")), target


def test_re_exports_and_inheritance(package):
    name = package(
        {
            "__init__.py": "from .deep.inner import Model as Net\nfrom .deep import *\nAlias = Net\n",
            "deep/__init__.py": "from PACKAGE.deep.inner import helper, Model\nfrom ..other import late\n",
            "deep/inner.py": """
                import abc, typing
                from typing import overload
                class Model(abc.ABC):
                    def __init__(self, dim: int, *, drop: float = 0.1) -> None: ...
                class Child(Model, typing.Generic[typing.TypeVar("T")]):
                    pass
                class Empty:
                    pass
                @overload
                def helper(a: int) -> int: ...
                @overload
                def helper(a: str) -> str: ...
                def helper(a, b=2): ...
                if True:
                    def inside(a): ...
                Model.__doc__ = "set later"
                """,
            "other.py": "import PACKAGE.deep.inner as renamed\ndef late(x, /): ...\nclass Far(renamed.Model): ...\n",
        }
    )
    inner = ["Model", "Child", "helper", "inside", "Empty"]
    for target in ["Net", "helper", "Model", "late", "Alias", "other.Far", *(f"deep.inner.{one}" for one in inner)]:
        assert shape(read(f"{name}.{target}")) == shape(imported(f"{name}.{target}")), target


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("def deco(f): return f\n@deco\ndef f(a): ...\n", "f"),
        ("try:\n    from x import f\nexcept ImportError:\n    def f(a): ...\n", "f"),
        ("f = make()\n", "f"),
        ("class f:\n    def __new__(cls, a): ...\n", "f"),
        ("class Meta(type): ...\nclass f(metaclass=Meta): ...\n", "f"),
        ("class A: ...\nclass B: ...\nclass f(A, B): ...\n", "f"),
        ("import abc\nclass f(abc.make()): ...\n", "f"),
        ("def base(): ...\nclass f(base()): ...\n", "f"),
        ("def __getattr__(name): ...\n", "f"),
        ("globals().update(f=3)\n", "f"),
        ("from math import sqrt as f\n", "f"),
        ("class A:\n    class f: ...\n", "A.f"),
        ("from dataclasses import dataclass\n@dataclass(init=False)\nclass f:\n    a: int\n", "f"),
        ("class f(f): ...\n", "f"),
    ],
)
def test_what_source_does_not_tell_is_left_to_stage_two(package, source, target):
    name = package({"__init__.py": "", "one.py": source})
    with pytest.raises(Unread):
        read(f"{name}.one.{target}")


@pytest.mark.parametrize("target", ["none.f", "one.g", "one.ff", "one.A.more", "one"])
def test_what_is_not_there_is_told(package, target):
    name = package({"__init__.py": "", "one.py": "def f(): ...\n"})
    with pytest.raises(NotThere):
        read(f"{name}.{target}")


def test_near_names_come_with_it(package):
    name = package({"models.py": "def build(): ...\n"})  # a namespace package: no __init__.py
    with pytest.raises(NotThere) as missing:
        read(f"{name}.model.build")
    assert missing.value.names == ("models",)
    with pytest.raises(NotThere) as missing:
        read(f"{name}.models.biuld")
    assert "build" in missing.value.names
    with pytest.raises(NotThere, match="no module not_installed_anywhere"):
        read("not_installed_anywhere.f")


def test_a_way_through_foreign_modules_is_refused(package):
    name = package({"__init__.py": "import os\nimport os.path as walk\n", "one.py": "import os\nimport subprocess\n"})
    for target, module in (("os.system", "os"), ("one.subprocess.run", "subprocess"), ("walk.join", "os.path")):
        with pytest.raises(PermissionError, match=rf"^{module}$"):
            read(f"{name}.{target}")


def test_broken_source_is_a_syntax_error(package):
    name = package({"__init__.py": "", "one.py": "def f(:\n"})
    with pytest.raises(SyntaxError):
        read(f"{name}.one.f")


@pytest.mark.parametrize(
    "target",
    ["torch.optim.AdamW", "torch.optim.SGD", "torch.nn.Linear", "torch.nn.LSTM", "torch.nn.TransformerEncoderLayer"],
)
def test_torch_is_read_as_it_is(target):
    assert shape(read(target)) == shape(imported(target))


def test_reading_imports_nothing(package):
    name = package({"__init__.py": "raise SystemExit('imported')", "one.py": "raise SystemExit\ndef f(a): ...\n"})
    assert list(read(f"{name}.one.f").parameters) == ["a"]
    assert name not in sys.modules
