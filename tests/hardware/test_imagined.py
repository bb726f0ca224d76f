import pytest

from tests.planning.machines import H200, LAPTOP, SMALL
from wellfed.hardware.imagined import with_cards


@pytest.mark.parametrize(
    ("facts", "profile", "memory_gib", "devices"),
    [
        (LAPTOP, "auto", None, 1),  # nothing says what card to think of
        (LAPTOP, "cpu", None, 1),
        (H200, "auto", None, 1),
        (H200, "8gb", 7.2, 1),  # a larger card rehearses a smaller one
    ],
)
def test_a_machine_that_can_do_it_stays_as_it_is(facts, profile, memory_gib, devices):
    assert with_cards(facts, profile, memory_gib, devices) == (facts, None)


@pytest.mark.parametrize(
    ("facts", "profile", "memory_gib", "devices", "size", "said"),
    [
        (LAPTOP, "8gb", 7.2, 1, 8, "a card of 8 GiB and capability 8.0; not in this machine"),
        (LAPTOP, "80gb", 72.0, 8, 80, "8 x a card of 80 GiB"),
        (LAPTOP, "auto", 5.0, 2, 5.0, "2 x a card of 5 GiB"),
        (LAPTOP, "24gb", 10.0, 1, 10.0, "a card of 10 GiB"),
        (SMALL, "24gb", 21.6, 1, 24, "a card of 24 GiB and capability 8.0; not in this machine"),
        (H200, "auto", None, 4, 139.8, "4 x NVIDIA H200 (139.8 GiB); this machine has 1"),
        (H200, "24gb", 21.6, 4, 139.8, "4 x NVIDIA H200"),
    ],
)
def test_what_is_missing_is_thought_of_and_said(facts, profile, memory_gib, devices, size, said):
    found, sentence = with_cards(facts, profile, memory_gib, devices)
    assert said in sentence
    assert [gpu.index for gpu in found.training_gpus] == list(range(devices))
    assert {gpu.memory_gib for gpu in found.training_gpus} == {size}
    assert all(gpu.others_gib == 0 and gpu.holders == () for gpu in found.training_gpus)
    assert (found.cpu, found.ram_gib) == (facts.cpu, facts.ram_gib)
