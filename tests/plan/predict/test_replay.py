import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wellfed.plan.predict.replay import Recording, Trace, renumbered, resized, without

MIB = 2**20


def made(*sizes, first=1, freed=True):
    """Tensors made one after the other and let go in the same order."""
    events = tuple((first + number, size) for number, size in enumerate(sizes))
    return (*events, *((number, 0) for number, _ in events)) if freed else events


def recording(resident=(), alone=(), after=(), first_step=(), step=(), **more):
    traces = [Trace.through({1: events}) for events in (alone, after, step)]
    return Recording(tuple(resident), (), traces[0], traces[1], tuple(first_step), traces[2], **more)


def reserved(of, samples=1, **more):
    return of.replayed(1, samples, **more).reserved


def test_rounding_of_what_is_there():
    assert reserved(recording([5 * MIB])) == 20 * MIB
    assert reserved(recording([5 * MIB, 0], expandable=True)) == 20 * MIB
    assert reserved(recording([32 * MIB], made(32 * MIB))) == 64 * MIB
    assert reserved(recording(), inputs=[3 * MIB, 100]) == 22 * MIB


def test_what_the_first_step_keeps_is_missed_by_the_second():
    state = made(14 * MIB, 14 * MIB, first=100, freed=False)
    found = recording([12 * MIB], made(40 * MIB, 40 * MIB), first_step=state).replayed(1, 1)
    assert found.asked == (12 + 28 + 80) * MIB
    assert found.reserved == (12 + 80 + 40) * MIB  # the state lies in one of the first two
    assert found.settles


def test_gradients_live_until_the_next_step_and_are_made_once():
    gradient = made(30 * MIB, first=50, freed=False)
    found = recording(alone=gradient, after=[(60, 30 * MIB), (60, 0)]).replayed(1, 4)
    assert (found.asked, found.reserved) == (60 * MIB, 60 * MIB)
    assert recording(alone=gradient, after=gradient).replayed(1, 4).reserved == 30 * MIB


def test_a_batch_comes_before_the_last_steps_gradients_go():
    gradient = made(30 * MIB, first=50, freed=False)
    of = recording(alone=(*gradient, (60, 30 * MIB), (60, 0)))
    assert reserved(of) == 60 * MIB
    assert reserved(of, inputs=[24 * MIB]) == (60 + 24) * MIB  # it finds a place, and not that of the gradients
    of = recording(alone=gradient)
    assert reserved(of, inputs=[30 * MIB]) == 60 * MIB
    assert of.replayed(1, 1, inputs=[30 * MIB], limit=60 * MIB).settles


def test_the_first_step_takes_what_others_take_beside_its_state():
    """Its state is made before: what comes after finds no more room in it."""
    of = recording(first_step=made(14 * MIB, first=100, freed=False), step=made(40 * MIB, first=200))
    assert reserved(of) == (14 + 40) * MIB
    of = recording(
        alone=made(54 * MIB), first_step=made(14 * MIB, first=100, freed=False), step=made(54 * MIB, first=200)
    )
    assert reserved(of) == (54 + 54) * MIB  # the state lies in the segment of the passes, which find it taken


def test_where_memory_is_short_cached_segments_go_back_once():
    """Those of the first passes; from then on they share the optimizer's."""
    wide = made(46 * MIB, first=100)
    of = recording(alone=made(*[11 * MIB] * 4), first_step=wide, step=wide)
    assert reserved(of) == (48 + 46) * MIB
    short = of.replayed(1, 1, limit=50 * MIB)
    assert short.settles
    assert short.reserved <= 50 * MIB
    assert not of.replayed(1, 1, limit=44 * MIB).settles


def test_what_must_give_back_in_every_step_does_not_settle():
    """The second of two large ones never finds the place of the first, which something small keeps."""
    passes = (*made(30 * MIB), (2, 40 * MIB), (2, 0))
    of = recording(alone=passes)
    assert of.replayed(1, 1).reserved == 70 * MIB
    found = of.replayed(1, 1, limit=60 * MIB)
    assert (found.reserved, found.settles) == (40 * MIB, True)  # the larger one serves both
    passes = ((1, 30 * MIB), (2, 5 * MIB), (1, 0), (3, 40 * MIB), (3, 0), (2, 0))
    assert recording(alone=passes).replayed(1, 1, limit=70 * MIB).reserved <= 70 * MIB


def test_a_trace_grows_in_a_line_where_both_are_the_same_events():
    low, high = ((1, 100), (2, 512), (1, 0), (2, 0)), ((1, 400), (2, 512), (1, 0), (2, 0))
    trace = Trace.through({1: low, 4: high})
    assert trace.at(1) == list(low)
    assert trace.at(3) == [(1, 300), (2, 512), (1, 0), (2, 0)]
    assert trace.at(8) == [(1, 800), (2, 512), (1, 0), (2, 0)]
    other = Trace.through({1: low[:2], 4: high})
    assert other.at(1) == other.at(3) == list(high)
    assert Trace.through({1: low[:2], 2: low, 5: high}).at(1) == [(1, 1), (2, 512), (1, 0), (2, 0)]


def test_numbers_by_the_order_of_making():
    one, two = renumbered([(7, 10), (9, 5), (3, 0), (7, 0)], [(9, 0), (12, 4)], first=20)
    assert one == [(20, 10), (21, 5), (20, 0)]
    assert two == [(21, 0), (22, 4)]


def test_events_are_changed():
    events = [(1, 10), (2, 20), (1, 0), (2, 0)]
    assert without(events, 1) == [(2, 20), (2, 0)]
    assert resized(events, 2, 99) == [(1, 10), (2, 99), (1, 0), (2, 0)]


def test_it_goes_through_json():
    of = recording([5], made(1, 2), made(3), made(4, freed=False), made(5), expandable=True)
    assert Recording.from_dict(json.loads(json.dumps(dataclasses.asdict(of)))) == of
    with pytest.raises(KeyError):
        Recording.from_dict({"resident": []})


sizes = st.lists(st.integers(1, 40 * MIB), max_size=12)


@pytest.mark.parametrize("expandable", [False, True])
@given(resident=sizes, one=sizes, two=sizes, state=sizes, share=st.floats(0.5, 1))
def test_a_limit_is_kept(expandable, resident, one, two, state, share):
    of = recording(
        resident,
        made(*one),
        made(*two, first=500),
        made(*state, first=1000, freed=False),
        made(*state[:3], first=2000),
        expandable=expandable,
    )
    freely = of.replayed(1, 2)
    assert freely.settles
    assert freely.reserved >= freely.asked
    limit = int(share * freely.reserved)
    short = of.replayed(1, 2, limit=limit)
    assert short.reserved <= limit
    if short.settles:
        assert short.asked == freely.asked <= limit
