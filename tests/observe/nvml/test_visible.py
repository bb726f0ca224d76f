import pytest

from tests.fake_nvml.scripted import Card, ScriptedNvml
from wellfed.observe.nvml.devices import Devices, list_devices
from wellfed.observe.nvml.session import NvmlSession
from wellfed.observe.nvml.visible import same_uuid, visible_devices

SMALL = Card("GPU-aaaa1111", "NVIDIA T4", 15 * 2**30, capability=(7, 5))
LARGE = Card("GPU-bbbb2222", "NVIDIA H200", 140 * 2**30)
TWIN = Card("GPU-bbbb3333", "NVIDIA H200", 140 * 2**30)


def found_in(*cards):
    with NvmlSession(lambda: ScriptedNvml(*cards)) as nvml:
        return list_devices(nvml)


def mapped(cards, visible=None, order="PCI_BUS_ID", torch_uuids=None):
    seen = visible_devices(found_in(*cards), visible=visible, order=order, torch_uuids=torch_uuids)
    assert [device.index for device in seen.devices] == list(range(len(seen.devices))) or torch_uuids
    return [device.uuid for device in seen.devices]


A, B, C = "GPU-aaaa1111", "GPU-bbbb2222", "GPU-bbbb3333"


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [A, B, C]),
        ("0,1,2", [A, B, C]),
        ("1", [B]),
        ("2,0", [C, A]),
        (" 1 , 0", [B, A]),
        ("1gpu,0", [B, A]),  # strtoul
        ("+1", [B]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0,-1,1", [A]),  # the first invalid entry ends the list
        ("0,3,1", [A]),
        ("0,,1", [A]),
        ("1,0,1", []),  # a repeated entry hides all
        (A, [A]),
        (f"{C},{A}", [C, A]),
        ("GPU-aaaa,GPU-bbbb3", [A, C]),
        ("GPU-aaaa,GPU-bbbb,GPU-bbbb2", [A]),  # ambiguous prefix
        ("GPU-cccc", []),
        (f"{B},0,{A}", [B]),  # kinds can't be mixed
        (f"0,{B}", [A]),
        (f"{B},{B}", []),
        (f"{B},GPU-bbbb2", []),
        ("MIG-aaaa", []),
    ],
)
def test_cuda_visible_devices(visible, expected):
    assert mapped([SMALL, LARGE, TWIN], visible) == expected


def test_two_different_cards_keep_their_own_figures():
    for visible, names in [("1,0", ["NVIDIA H200", "NVIDIA T4"]), ("GPU-aaaa1111", ["NVIDIA T4"])]:
        seen = visible_devices(found_in(SMALL, LARGE), visible=visible, order="PCI_BUS_ID").devices
        assert [device.name for device in seen] == names
        assert [device.index for device in seen] == list(range(len(names)))
    assert seen[0].memory_total_bytes == 15 * 2**30
    assert seen[0].nvml_index == 0


def test_different_cards_in_the_default_order_are_not_certain():
    seen = visible_devices(found_in(SMALL, LARGE), visible="0", order=None)
    (note,) = seen.notes
    assert "NVIDIA T4, NVIDIA H200" in note
    assert "CUDA_DEVICE_ORDER=(not set)" in note
    assert note.endswith("Run: export CUDA_DEVICE_ORDER=PCI_BUS_ID")
    (note,) = visible_devices(found_in(SMALL, LARGE), visible=None, order="FASTEST_FIRST").notes
    assert "CUDA_DEVICE_ORDER=FASTEST_FIRST" in note


@pytest.mark.parametrize(
    ("cards", "visible", "order"),
    [
        ([SMALL, LARGE], "0", "PCI_BUS_ID"),
        ([SMALL, LARGE], B, None),
        ([SMALL, LARGE], "", None),
        ([LARGE, TWIN], "1", None),
    ],
)
def test_certain_maps_carry_no_note(cards, visible, order):
    assert visible_devices(found_in(*cards), visible=visible, order=order).notes == ()


def test_torch_decides_where_it_was_asked():
    # FASTEST_FIRST: torch's device 0 is the H200, NVML's is the T4.
    seen = visible_devices(found_in(SMALL, LARGE), visible="0,1", order=None, torch_uuids=["bbbb2222", "aaaa1111"])
    assert [(device.index, device.uuid, device.nvml_index) for device in seen.devices] == [(0, B, 1), (1, A, 0)]
    assert seen.notes == ()


def test_a_device_of_torch_that_nvml_lacks_keeps_the_numbering():
    seen = visible_devices(found_in(LARGE), visible=None, order=None, torch_uuids=["cccc", "bbbb2222"])
    assert [(device.index, device.uuid) for device in seen.devices] == [(1, B)]
    assert seen.notes == ("torch's device 0 (cccc) is not among NVML's; its figures are absent.",)


def test_notes_of_the_listing_are_kept():
    assert visible_devices(Devices((), ("card 0 is left out.",)), visible=None, order=None).notes == (
        "card 0 is left out.",
    )
    assert visible_devices(Devices((), ("x",)), visible=None, order=None, torch_uuids=[]).notes == ("x",)


SPLIT = Card("GPU-dddd", "NVIDIA A100", slots=[Card("MIG-1111"), Card("MIG-1122")])


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["MIG-1111", B]),
        ("0", ["MIG-1111"]),
        ("1", [B]),
        ("MIG-1122", ["MIG-1122"]),
        ("MIG-112", ["MIG-1122"]),
        ("MIG-11", []),
        ("MIG-1122,MIG-1111", ["MIG-1122"]),  # a process gets one instance
        ("GPU-dddd", []),
    ],
)
def test_a_card_in_mig_mode_stands_for_its_first_instance(visible, expected):
    assert mapped([SPLIT, LARGE], visible) == expected


def test_a_split_card_without_instances_is_no_device():
    assert mapped([Card("GPU-dddd", slots=[None, None]), LARGE]) == [B]


def test_torchs_uuid_has_no_prefix():
    assert same_uuid("GPU-AAAA1111", "aaaa1111")
    assert same_uuid("MIG-aaaa", "aaaa")
    assert not same_uuid("GPU-aaaa", "bbbb")
