"""Chooses the cases of a test that ``make test`` runs."""

from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def slow(*values: Any, **more: Any) -> ParameterSet:
    """Returns a case that only ``make test-all`` runs; ``more`` as in `pytest.param`, such as ``id``."""
    return pytest.param(*values, marks=pytest.mark.slow, **more)


def few(cases: Iterable[Any], number: int) -> list[ParameterSet]:
    """Returns the cases as parameters. All but ``number`` of them, evenly spread, are slow: ``make test-all`` has all.

    Args:
        cases: values of the parameters; a tuple has one value for each of several names.
    """
    found = [_parameters(case) for case in cases]
    last = len(found) - 1
    kept = {round(place * last / max(1, number - 1)) for place in range(number)}
    return [
        each if place in kept else each._replace(marks=(*each.marks, pytest.mark.slow))
        for place, each in enumerate(found)
    ]


def _parameters(case: Any) -> ParameterSet:
    if isinstance(case, ParameterSet):
        return case
    return pytest.param(*case) if isinstance(case, tuple) else pytest.param(case)
