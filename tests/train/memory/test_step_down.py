from hypothesis import given
from hypothesis import strategies as st

from wellfed.train.memory.step_down import Fallbacks, MicroBatches


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


def test_what_has_changed_can_be_typed():
    micro = MicroBatches(8)
    others = {
        "memory.checkpoint_activations=true": lambda: True,
        "memory.features=cache_host": lambda: False,
        "memory.features=dynamic": lambda: True,
    }
    fallbacks = Fallbacks(micro, others)
    assert fallbacks.changes() == {}
    assert fallbacks.step_down() == {"micro_batch": 4, "before": 8}
    assert fallbacks.changes() == {"memory.micro_batch": 4}
    while fallbacks.step_down():
        pass
    assert fallbacks.changes() == {
        "memory.micro_batch": 1,
        "memory.checkpoint_activations": True,
        "memory.features": "dynamic",
    }
    tried = "micro-batches of 8 -> 4 -> 2 -> 1, then memory.checkpoint_activations=true, then memory.features=dynamic"
    assert fallbacks.tried() == tried
