import pytest
from hypothesis import given
from hypothesis import strategies as st

from wellfed.memory.replay import Recording, Slack, resized, slack, without

MIB = 2**20


def made(*sizes, first=1, freed=True):
    """Tensors made one after the other and let go in the same order."""
    events = [(first + number, size) for number, size in enumerate(sizes)]
    return events + [(number, 0) for number, _ in events] if freed else events


def test_rounding_of_what_is_there():
    assert slack(Recording([5 * MIB]), [], expandable=False) == Slack(15 * MIB, 15 * MIB)
    assert slack(Recording([5 * MIB, 0]), [], expandable=True) == Slack(15 * MIB, 15 * MIB)
    assert slack(Recording([32 * MIB]), made(32 * MIB), expandable=False) == Slack(0, 0)


def test_what_is_made_again_finds_its_place():
    recording = Recording([12 * MIB], first_step=made(14 * MIB, 14 * MIB, first=100, freed=False))
    alone = made(40 * MIB, 40 * MIB)
    # The state is made while the passes' blocks are cached: it splits them, and they are missed in the second step.
    found = slack(recording, alone, expandable=False)
    assert found == Slack(12 * MIB, 12 * MIB)


def test_gradients_live_until_the_next_step():
    gradient = made(30 * MIB, first=50, freed=False)
    assert slack(Recording(), gradient, gradient, expandable=False) == Slack(0, 0)


def test_where_memory_is_short_cached_segments_go_back_once():
    """Those of the first passes; from then on they share the optimizer's."""
    recording = Recording(step=made(46 * MIB, first=100), first_step=made(46 * MIB, first=100))
    parts = made(*[11 * MIB] * 4)
    found = slack(recording, parts, expandable=False)
    assert found.free == 48 * MIB
    assert found.least < 4 * MIB
    assert slack(recording, parts, expandable=True).free < 20 * MIB


def test_the_optimizer_may_depend_on_the_pass():
    found = [slack(Recording(), [], step=made(size * MIB, first=9), expandable=False).free for size in (12, 13, 14, 5)]
    assert found == [0, MIB, 0, 15 * MIB]


def test_events_are_changed():
    events = [(1, 10), (2, 20), (1, 0), (2, 0)]
    assert without(events, 1) == [(2, 20), (2, 0)]
    assert resized(events, 2, 99) == [(1, 10), (2, 99), (1, 0), (2, 0)]


sizes = st.lists(st.integers(1, 40 * MIB), max_size=12)


@pytest.mark.parametrize("expandable", [False, True])
@given(resident=sizes, one=sizes, two=sizes, state=sizes)
def test_the_least_is_never_more_than_what_is_taken_freely(expandable, resident, one, two, state):
    recording = Recording(resident, first_step=made(*state, first=1000, freed=False), step=made(*state[:3], first=2000))
    found = slack(recording, made(*one), made(*two, first=500), expandable=expandable)
    assert 0 <= found.least <= found.free
