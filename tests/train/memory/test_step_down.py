import torch
from hypothesis import given
from hypothesis import strategies as st

from wellfed.train.memory.step_down import Fallback, Fallbacks, MicroBatches, one_weight_at_a_time


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


def no_memory() -> bool:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")


def test_a_rung_that_has_no_room_itself_is_left_out() -> None:
    taken: list[str] = []
    others = [
        Fallback("memory.features=cache_host", no_memory),
        Fallback("memory.features=dynamic", lambda: taken.append("dynamic") is None),
    ]
    fallbacks = Fallbacks(MicroBatches(1), others)
    assert fallbacks.step_down() == {"change": "memory.features=dynamic"}
    assert fallbacks.step_down() is None
    assert taken == ["dynamic"]
    assert fallbacks.tried() == (
        "micro-batches of 1, then memory.features=cache_host (for which memory did not suffice itself), "
        "then memory.features=dynamic"
    )


def test_between_passes_only_what_lies_there_is_freed() -> None:
    others = [Fallback("checkpointing", lambda: True), Fallback("features", lambda: True, frees_held=True)]
    fallbacks = Fallbacks(MicroBatches(2), others)
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), foreach=True)
    assert fallbacks.step_down(optimizer) == {"change": "workload.optimizer.foreach=false"}
    assert fallbacks.step_down(optimizer) == {"change": "features"}
    assert fallbacks.step_down(optimizer) == {"micro_batch": 1, "before": 2}
    assert fallbacks.step_down(optimizer) == {"change": "checkpointing"}
    assert fallbacks.step_down(optimizer) is None


def test_what_has_changed_can_be_typed():
    micro = MicroBatches(8)
    others = [
        Fallback("memory.checkpoint_activations=true", lambda: True),
        Fallback("memory.features=dynamic", lambda: True),
    ]
    fallbacks = Fallbacks(micro, others)
    assert fallbacks.changes() == {}
    fallbacks.step_down(torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), foreach=True))
    fallbacks.step_down()
    assert fallbacks.changes() == {"memory.micro_batch": 4, "workload.optimizer.foreach": False}
    while fallbacks.step_down():
        pass
    assert fallbacks.changes() == {
        "memory.micro_batch": 1,
        "workload.optimizer.foreach": False,
        "memory.checkpoint_activations": True,
        "memory.features": "dynamic",
    }


def test_one_weight_at_a_time() -> None:
    weights = list(torch.nn.Linear(2, 2).parameters())
    optimizer = torch.optim.Adam(weights, foreach=True)
    assert one_weight_at_a_time(optimizer)
    assert optimizer.param_groups[0]["foreach"] is False
    assert not one_weight_at_a_time(optimizer)
    assert not one_weight_at_a_time(torch.optim.Adam(weights, fused=True))
