"""Yaml values against annotations: the same answer for source text and for the imported type."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from inspect import Parameter
from typing import Any, Literal, Optional, Union

import pytest

from wellfed.config.faults.annotation import misfit


class Tensor:
    """Stands for torch's: a member of unions that yaml can't write."""


class Colour(Enum):
    red = 1


# What the annotations below may name when they are evaluated.
NAMES = {"Any": Any, "Literal": Literal, "Optional": Optional, "Union": Union, "Sequence": Sequence}
NAMES |= {"Tensor": Tensor, "Colour": Colour}

CASES: list[tuple[str, list[Any], list[Any]]] = [
    ("int", [3, -1], ["abc", 1.5, True, None, [1]]),
    ("float", [3, 1.5], ["fast", True, None]),
    ("bool", [True, False], [1, 0, "true"]),
    ("str", ["a", ""], [1, True, ["a"], None]),
    ("int | None", [3, None], ["abc", 1.5]),
    ("Optional[int]", [3, None], ["abc"]),
    ("Union[int, str]", [3, "a"], [1.5, None]),
    ("float | Tensor", [0.1], ["fast", None]),
    ("Union[float, Tensor]", [0.1], ["fast"]),
    ("Literal['mean', 'sum']", ["mean"], ["max", 1]),
    ("Literal[1, True]", [1, True], [2, "1"]),
    ("list[int]", [[1]], [3, "ab"]),
    ("tuple[float, float]", [[0.9, 0.99]], [0.9]),
    ("Sequence[str]", [["a"]], [3]),
    ("dict[str, int]", [{"a": 1}], [3, [1]]),
    ("Tensor", [3, "a", None], []),
    ("Colour", [3, "red"], []),
    ("Any", [3, "a", None, [1]], []),
]


def parameter(annotation: Any, default: Any = Parameter.empty) -> Parameter:
    return Parameter("x", Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


@pytest.mark.parametrize(("text", "good", "bad"), CASES)
def test_the_same_for_source_and_imported_types(text, good, bad):
    for annotation in (text, eval(text, dict(NAMES)), repr(text)):
        for value in good:
            assert misfit(value, parameter(annotation)) == "", (annotation, value)
        for value in bad:
            assert misfit(value, parameter(annotation)).startswith("must be "), (annotation, value)


def test_says_what_it_must_be():
    assert misfit("abc", parameter("int | None")) == "must be a whole number or null."
    assert misfit("x", parameter(Literal["mean", "sum"])) == "must be one of mean, sum."


@pytest.mark.parametrize("annotation", [Parameter.empty, "'not an annotation ('", "also not ("])
def test_what_can_not_be_judged_passes(annotation):
    assert misfit("abc", parameter(annotation)) == ""


def test_a_default_of_none_lets_null_through():
    assert misfit(None, parameter(int, default=None)) == ""
    assert misfit(None, parameter("int", default=None)) == ""
    assert misfit(None, parameter(int, default=3)) != ""
