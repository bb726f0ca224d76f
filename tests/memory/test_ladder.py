import pytest
from hypothesis import given
from hypothesis import strategies as st

from wellfed.memory.ladder import MicroBatches


@given(size=st.integers(1, 300), num_samples=st.integers(1, 2000))
def test_micro_batches_add_up_and_only_the_last_is_smaller(size, num_samples):
    sizes = MicroBatches(size).sizes(num_samples)
    assert sum(sizes) == num_samples
    assert all(each == size for each in sizes[:-1])
    assert 1 <= sizes[-1] <= size


@given(size=st.integers(1, 5000))
def test_it_halves_down_to_one(size):
    micro = MicroBatches(size)
    while (smaller := micro.step_down()) is not None:
        assert smaller == micro.tried[-2] // 2 >= 1
    assert micro.size == 1
    assert micro.step_down() is None
    assert micro.tried[0] == size


@given(size=st.integers(1, 100), steps=st.lists(st.integers(1, 120), min_size=1))
def test_given_steps_are_taken_downwards(size, steps):
    micro = MicroBatches(size, steps)
    while micro.step_down() is not None:
        pass
    assert micro.tried == [size, *sorted((step for step in steps if step < size), reverse=True)]


@pytest.mark.parametrize(
    ("steps", "tried"), [([16, 4], [64, 16, 4]), ([64, 128], [64]), (None, [64, 32, 16, 8, 4, 2, 1])]
)
def test_a_ladder(steps, tried):
    micro = MicroBatches(64, steps)
    while micro.step_down():
        pass
    assert micro.tried == tried
