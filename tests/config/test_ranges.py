"""The ranges of the schema's numbers: every number has one, and what lies outside is told with a way out."""

import math
from typing import get_args

import pytest

from wellfed.config.knobs import Range, entries
from wellfed.config.rules import value_faults
from wellfed.config.schema import RunConfig

LISTS = {"loader.skip_ids"}
RANGES = {name: knob.range for name, knob in entries(RunConfig).items() if knob.range is not None}


def numbers() -> set[str]:
    found = set()
    for name, knob in entries(RunConfig).items():
        if {knob.type, *get_args(knob.type)} & {int, float}:
            found.add(name)
    return found


def test_every_number_of_the_schema_has_a_range():
    assert numbers() == set(RANGES)
    assert len(RANGES) > 30


@pytest.mark.parametrize("dotted", sorted(RANGES))
def test_limits(make_config, dotted):
    allowed = RANGES[dotted]
    is_list = dotted in LISTS
    good, bad = [], [math.nan, math.inf, -math.inf]
    for limit, inclusive, step in (
        (allowed.at_least, True, -1e-3),
        (allowed.above, False, -1e-3),
        (allowed.at_most, True, 1e-3),
        (allowed.below, False, 1e4),
    ):
        if limit is not None:
            (good if inclusive else bad).append(limit)
            bad.append(limit + step)
    assert len(bad) > 3
    for value in bad:
        (fault,) = value_faults(make_config({dotted: [value] if is_list else value}))
        assert fault.where.startswith(f"{dotted}=")
        assert str(allowed) in fault.problem
        assert fault.way_out.startswith(f"Set {dotted}=")
    for value in good:
        assert not list(value_faults(make_config({dotted: [value] if is_list else value})))


@pytest.mark.parametrize("dotted", sorted(RANGES))
def test_the_way_out_is_in_range(make_config, dotted):
    if dotted in LISTS:
        return  # below
    fault = next(value_faults(make_config({dotted: math.nan})))
    typed = fault.way_out.removeprefix(f"Set {dotted}=").removesuffix(".")
    assert RANGES[dotted].holds(float(typed))


@pytest.mark.parametrize(
    ("dotted", "values", "way_out"),
    [
        ("loader.skip_ids", [3, -4], "Set loader.skip_ids=[3]."),
        ("loader.skip_ids", [3, -4, 12, 0], "Set loader.skip_ids=[3,12,0]."),
        ("loader.skip_ids", [-4], "Set loader.skip_ids=[]."),
    ],
)
def test_the_way_out_of_a_list_is_its_legal_entries(make_config, dotted, values, way_out):
    (fault,) = value_faults(make_config({dotted: values}))
    assert fault.way_out == way_out
    assert dotted in LISTS


def test_null_passes_only_where_the_schema_has_it(make_config):
    assert list(value_faults(make_config({"gpu.memory_gib": None}))) == []
    assert not entries(RunConfig)["seed"].is_optional


def test_a_range_reads_as_it_is_checked():
    assert str(Range(above=0, at_most=1)) == "> 0 and <= 1"
    assert str(RANGES["seed"]) == ">= 0 and < 2**63"
    assert not RANGES["seed"].holds(2**63)
    assert RANGES["seed"].holds(2**63 - 1)
