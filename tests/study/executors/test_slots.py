"""GPUs and CPUs of this machine, divided among trials."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wellfed.study.executors.slots import Slot, Slots, visible

UUIDS = [f"GPU-{number}" for number in range(8)]
CPUS = st.none() | st.sets(st.integers(0, 200), min_size=1, max_size=64).map(frozenset)


@given(st.integers(0, 8), CPUS, st.lists(st.integers(-3, 4), max_size=40))
def test_no_gpu_has_two_trials_and_all_come_back(num_gpus: int, cpus: frozenset[int] | None, wishes: list[int]) -> None:
    """A wish of n >= 0 asks for n GPUs; n < 0 gives back one of those that are out."""
    slots, out = Slots(UUIDS[:num_gpus], cpus), []
    for wish in wishes:
        if wish < 0:
            if out:
                slots.give_back(out.pop(wish % len(out)))
            continue
        used = {gpu for place in out for gpu in place.gpus}
        place = slots.take(wish)
        is_alone = any(not each.gpus for each in out)
        if wish == 0:
            assert (place is None) == bool(out)
        else:
            assert (place is None) == (is_alone or num_gpus - len(used) < wish)
        if place is None:
            continue
        assert len(place.gpus) == wish
        assert not used & set(place.gpus)
        named = ",".join(UUIDS[gpu] for gpu in place.gpus)
        assert dict(place.environment) == ({"CUDA_VISIBLE_DEVICES": named} if wish else {})
        out.append(place)
        assert_shares_apart(out)
    for place in out:
        slots.give_back(place)
    if num_gpus:
        whole = slots.take(num_gpus)
        assert whole is not None
        assert whole.gpus == tuple(range(num_gpus))


def assert_shares_apart(out: list[Slot]) -> None:
    shares = [place.cpus for place in out if place.cpus is not None]
    assert sum(map(len, shares)) == len(frozenset().union(*shares))


@pytest.mark.parametrize(
    ("gpus", "cpus"),
    [(UUIDS[:1], frozenset(range(8))), (UUIDS[:4], frozenset(range(3))), (UUIDS[:2], None)],
    ids=["one GPU", "fewer processors than GPUs", "unknown"],
)
def test_where_nothing_is_to_be_shared_all_may_be_used(gpus: list[str], cpus: frozenset[int] | None) -> None:
    place = Slots(gpus, cpus).take(1)
    assert place is not None
    assert place.cpus is None


@pytest.mark.parametrize(
    ("environment", "num_gpus", "names"),
    [
        ({}, 2, ["0", "1"]),
        ({"CUDA_VISIBLE_DEVICES": "3,1"}, 2, ["3", "1"]),
        ({"CUDA_VISIBLE_DEVICES": " GPU-a , MIG-b "}, 2, ["GPU-a", "MIG-b"]),
        ({"CUDA_VISIBLE_DEVICES": "2,9,4"}, 1, ["2"]),  # CUDA stops at what it does not know
        ({"CUDA_VISIBLE_DEVICES": "7"}, 2, ["0", "1"]),  # set after CUDA was asked
    ],
)
def test_children_see_the_same_gpus_by_the_same_names(
    environment: dict[str, str], num_gpus: int, names: list[str]
) -> None:
    assert visible(environment, num_gpus) == names
