"""Points and their ids, and the file that says which sweep a folder holds."""

from collections.abc import Mapping
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wellfed.study.points.grid import Grid, group_of, point_id

NAMES = st.sampled_from(["loader", "seed", "loader.num_workers", "+workload.data.scale", "memory"])
VALUES = st.lists(st.text("abc012[]{}.", min_size=1, max_size=4), min_size=1, max_size=3, unique=True).map(tuple)
OVERRIDES = st.lists(st.builds("{}={}".format, NAMES, st.text("abc01", max_size=3)), max_size=6, unique=True)
OF_THE_SWEEP = st.lists(
    st.sampled_from(
        [
            "sweep=quick",
            "sweep.trial_steps=50",
            "hydra/launcher=basic",
            "hydra.sweep.dir=x",
            "logger=none",
            "++logger.mode=disabled",
            "telemetry.ceiling_steps=3",
            "+telemetry@x=dense",
            "paths.log_dir=there",
        ]
    )
)


@given(st.data(), OVERRIDES, OF_THE_SWEEP)
def test_neither_the_order_nor_how_it_is_watched_makes_it_another_point(
    data: st.DataObject, overrides: list[str], others: list[str]
) -> None:
    mixed = data.draw(st.permutations([*overrides, *others]))
    assert point_id(mixed) == point_id(overrides)


@given(OVERRIDES, OVERRIDES)
def test_other_overrides_make_another_point(one: list[str], other: list[str]) -> None:
    assert (point_id(one) == point_id(other)) == (sorted(one) == sorted(other))


@pytest.mark.parametrize(
    ("override", "group"),
    [
        ("loader=auto", "loader"),
        ("loader.backend=torch", "loader"),
        ("+workload.data.x=1", "workload"),
        ("++sweep.name=a.b", "sweep"),
        ("~logger", "logger"),
        ("hydra/launcher=basic", "hydra"),
        ("logger@other=none", "logger"),
        ("sweeping=1", "sweeping"),
    ],
)
def test_the_group_of_an_override(override: str, group: str) -> None:
    assert group_of(override) == group


@given(st.dictionaries(NAMES, VALUES, max_size=3), OVERRIDES)
def test_the_points_are_all_combinations_each_once(axes: Mapping[str, tuple[str, ...]], fixed: list[str]) -> None:
    made = Grid(axes, tuple(fixed))
    points = made.points()
    assert made.size == len(points) == prod(map(len, axes.values()))
    assert len({tuple(point.values.items()) for point in points}) == len(points)
    for point in points:
        assert list(point.values) == list(axes)
        assert all(value in axes[axis] for axis, value in point.values.items())
        assert point.overrides == (*fixed, *(f"{axis}={value}" for axis, value in point.values.items()))
        assert point.id == point_id(point.overrides)
