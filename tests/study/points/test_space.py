"""What may vary, from what was typed: every axis holds what it was typed with, and what is none is told."""

import json
import math
from dataclasses import asdict

import pytest
from hydra.types import RunMode
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.few import few
from wellfed.config.hydra_session import open_hydra
from wellfed.config.multirun import Multirun, Varied
from wellfed.errors import ConfigError
from wellfed.study.points.grid import group_of
from wellfed.study.points.space import (
    LOG_FROM,
    Choices,
    Numbers,
    describe,
    from_dict,
    grid_values,
    show_value,
    size,
    space_of,
)

LR = "workload.optimizer.lr"
FINITE = st.floats(-1e9, 1e9, allow_subnormal=False)


def typed(*overrides: str, may_be_interval: bool = True) -> dict[str, Varied]:
    hydra = open_hydra()
    master = hydra.compose_config("train", ["hydra.mode=MULTIRUN"], RunMode.MULTIRUN)
    multirun = Multirun(
        hydra.config_loader, master, params={}, arguments=overrides, group_of=group_of, no_axes=("search", "hydra")
    )
    return multirun.varied(may_be_interval=may_be_interval)[0]


def interval(low: float, high: float, *tags: str, is_whole: bool = False) -> Varied:
    return Varied(f"x=interval({low},{high})", interval=(low, high), is_whole=is_whole, tags=frozenset(tags))


@pytest.mark.parametrize(
    ("text", "axis"),
    few(
        [
            (f"{LR}=0.1,0.01", Choices(("0.1", "0.01"))),
            ("loader=auto,baseline", Choices(("auto", "baseline"))),
            (f"{LR}=interval(1e-4,1e-1)", Numbers(1e-4, 1e-1, is_log=True)),
            (f"{LR}=tag(linear,interval(1e-4,1e-1))", Numbers(1e-4, 1e-1)),
            (f"{LR}=tag(log,interval(0.1,0.9))", Numbers(0.1, 0.9, is_log=True)),
            ("seed=int(interval(1,100))", Numbers(1, 100, is_log=True, step=1)),
            ("seed=range(1,9,2)", Numbers(1, 7, step=2)),
            ("seed=tag(log,range(1,1025))", Numbers(1, 1024, is_log=True, step=1)),
            ("seed=range(1,3)", Choices(("1", "2"))),
            (f"{LR}=range(0,1,0.25)", Choices(("0.0", "0.25", "0.5", "0.75"))),
        ],
        6,
    ),
)
def test_what_is_typed_is_what_is_searched(text, axis):
    ((name, found),) = space_of(typed(text)).items()
    assert (name, found) == (text.partition("=")[0], axis)


@pytest.mark.parametrize(
    ("text", "words"),
    few(
        [
            (f"{LR}=interval(0.1,0.01)", f"ends before it starts. Write {LR}=interval(0.01,0.1)."),
            (f"{LR}=interval(0,inf)", f"has no bound on one side. Name both: {LR}=interval(0.1,10)"),
            (f"{LR}=tag(log,interval(0,1))", "is searched by powers, and 0 has no logarithm"),
            (f"{LR}=tag(logg,interval(1,2))", "has the tag logg, and a search knows linear, log"),
            (f"{LR}=tag(log,choice(1,2))", "has a tag that is about numbers without gaps"),
            ("seed=tag(log,range(0,9))", "has no logarithm at its start"),
            ("loader=interval(0,1)", "loader has options, and these are no numbers"),
            (f"{LR}=interval(0.1)", "can't be read"),
            ("search.max_trials=1,2", "is no axis"),
            ("workload.optimiser.lr=interval(0,1)", "there is no knob workload.optimiser.lr"),
        ],
        5,
    ),
)
def test_what_is_no_axis_is_told(text, words):
    with pytest.raises(ConfigError) as caught:
        space_of(typed(text))
    (fault,) = caught.value.faults
    assert words in str(fault)
    assert str(fault).startswith(text)


@given(st.tuples(FINITE, FINITE), st.sampled_from([(), ("log",), ("linear",)]), st.booleans())
def test_an_interval_is_an_axis_with_its_bounds_or_a_fault(bounds, tags, is_whole):
    low, high = (math.floor(bound) if is_whole else bound for bound in bounds)
    try:
        axis = space_of({"x": interval(low, high, *tags, is_whole=is_whole)})["x"]
    except ConfigError:
        assert low >= high or ("log" in tags and low <= 0)
        return
    assert isinstance(axis, Numbers)
    assert (axis.low, axis.high, axis.step) == (low, high, 1 if is_whole else None)
    wide = low > 0 and high / low >= LOG_FROM
    assert axis.is_log is ("log" in tags or (wide and "linear" not in tags))


AXES = st.one_of(
    st.builds(Choices, st.lists(st.text(min_size=1), min_size=1, max_size=4, unique=True).map(tuple)),
    st.builds(Numbers, st.floats(0.1, 1), st.floats(2, 3), st.booleans()),
    st.builds(Numbers, st.integers(1, 4).map(float), st.integers(5, 9).map(float), st.booleans(), st.just(1)),
)


@given(st.dictionaries(st.text(min_size=1), AXES, min_size=1, max_size=4))
def test_a_space_that_is_written_is_read(space):
    assert from_dict(json.loads(json.dumps({name: asdict(axis) for name, axis in space.items()}))) == space
    number = size(space)
    assert (number is None) is any(isinstance(axis, Numbers) and axis.step is None for axis in space.values())
    if number is not None:
        assert number == math.prod(len(values) for values in grid_values(space).values())


def test_what_people_read():
    space = space_of(typed(f"{LR}=interval(1e-4,1e-1)", "seed=range(1,9,2)", "loader=auto,baseline"))
    assert describe(space) == f"{LR}: 0.0001 to 0.1, log; seed: 1 to 7 in steps of 2; loader: auto, baseline"
    assert [show_value(text) for text in ("0.0017826497151386949", "32", "e", "a.b", "1e-05")] == [
        "0.001783", "32", "e", "a.b", "1e-05",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("axis", "middle"),
    [
        (Choices(("a", "b", "c")), "b"),
        (Numbers(1e-4, 1e-2, is_log=True), "0.001"),
        (Numbers(0.0, 1.0), "0.5"),
        (Numbers(1, 9, step=2), "5"),
    ],
)
def test_the_middle_of_an_axis_is_a_value_of_it(axis, middle):
    assert axis.middle == middle
