import pytest

from tests.fake_nvml.scripted import Card, ScriptedNvml
from wellfed.observe.nvml.devices import list_devices
from wellfed.observe.nvml.session import NvmlSession
from wellfed.observe.nvml.visible import same_uuid, visible_devices

A, B, C = "GPU-aaaa1111", "GPU-bbbb2222", "GPU-bbbb3333"
SPLIT = Card("GPU-dddd", "NVIDIA A100", slots=[Card("MIG-1111"), Card("MIG-1122")])


def found_in(*cards):
    with NvmlSession(lambda: ScriptedNvml(*cards)) as nvml:
        return list_devices(nvml)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [A, B, C]),
        ("0,1,2", [A, B, C]),
        ("2, 0", [C, A]),
        ("", []),
        ("-1", []),
        ("0,3,1", [A]),  # the first entry that names no card ends the list
        (f"{C},{A}", [C, A]),
        ("GPU-cccc", []),
    ],
)
def test_cuda_visible_devices(visible, expected):
    seen = visible_devices(found_in(Card(A), Card(B), Card(C)), visible=visible).devices
    assert [(device.index, device.uuid) for device in seen] == list(enumerate(expected))


@pytest.mark.parametrize(("visible", "expected"), [(None, ["MIG-1111", B]), ("1", [B]), ("MIG-1122", ["MIG-1122"])])
def test_a_card_in_mig_mode_stands_for_its_first_instance(visible, expected):
    assert [device.uuid for device in visible_devices(found_in(SPLIT, Card(B)), visible=visible).devices] == expected


@pytest.mark.parametrize(
    ("options", "is_unsure"),
    [
        ({"visible": None}, True),
        ({"visible": "1,0"}, True),
        ({"visible": f"{B},{A}"}, False),
        ({"visible": None, "order": "PCI_BUS_ID"}, False),
        ({"visible": None, "torch_uuids": [B, A]}, False),
    ],
)
def test_the_numbers_of_different_cards_may_be_others_than_cudas(options, is_unsure):
    notes = visible_devices(found_in(Card(A, "NVIDIA A100"), Card(B, "NVIDIA H200")), **options).notes
    assert ["CUDA_DEVICE_ORDER=PCI_BUS_ID" in each for each in notes] == [True] * is_unsure
    assert visible_devices(found_in(Card(A, "NVIDIA A100"), Card(B, "NVIDIA A100")), **options).notes == ()


def test_torch_decides_where_it_was_asked():
    seen = visible_devices(found_in(Card(A), Card(B)), visible="0,1", torch_uuids=["bbbb2222", "aaaa1111"])
    assert [(device.index, device.uuid, device.nvml_index) for device in seen.devices] == [(0, B, 1), (1, A, 0)]
    assert seen.notes == ()


def test_a_device_of_torch_that_nvml_lacks_keeps_the_numbering():
    seen = visible_devices(found_in(Card(B)), visible=None, torch_uuids=["cccc", "bbbb2222"])
    assert [(device.index, device.uuid) for device in seen.devices] == [(1, B)]
    (note,) = seen.notes
    assert "cccc" in note


def test_torchs_uuid_has_no_prefix():
    assert same_uuid("GPU-AAAA1111", "aaaa1111")
    assert same_uuid("MIG-aaaa", "aaaa")
    assert not same_uuid("GPU-aaaa", "bbbb")
