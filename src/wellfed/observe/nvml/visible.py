"""Finds which NVML device CUDA numbers 0, 1, ...: by torch's UUIDs, or else by CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from wellfed.observe.machine_facts import GpuFacts
from wellfed.observe.nvml.devices import Devices


def visible_devices(
    found: Devices, *, visible: str | None, order: str | None = None, torch_uuids: Sequence[str] | None = None
) -> Devices:
    """Returns the devices that CUDA shows this process, in CUDA's order, with ``index`` filled in.

    Args:
        found: all devices in NVML's order.
        visible: the value of CUDA_VISIBLE_DEVICES; None = not set, "" hides all.
        order: the value of CUDA_DEVICE_ORDER; None = not set.
        torch_uuids: ``torch.cuda.get_device_properties(i).uuid`` as text, by torch's index; then the
            variables are ignored.
    """
    notes = list(found.notes)
    if torch_uuids is None:
        chosen = _chosen(found.devices, visible)
        names = ", ".join(dict.fromkeys(card.name for card in found.devices if not card.is_mig))
        if ", " in names and order != "PCI_BUS_ID" and not (visible or "").startswith(("GPU-", "MIG-")):
            notes.append(
                f"the cards differ ({names}), and CUDA numbers the fastest first, so NVML's order may not be CUDA's. "
                "Run: export CUDA_DEVICE_ORDER=PCI_BUS_ID"
            )
        devices = [replace(each, index=index) for index, each in enumerate(chosen)]
        return replace(found, devices=tuple(devices), notes=tuple(notes))
    devices = []
    for index, uuid in enumerate(torch_uuids):
        match = next((device for device in found.devices if same_uuid(device.uuid or "", uuid)), None)
        if match is None:
            notes.append(f"torch's device {index} ({uuid}) is not among NVML's; its figures are absent.")
        else:
            devices.append(replace(match, index=index))
    return replace(found, devices=tuple(devices), notes=tuple(notes))


def same_uuid(left: str, right: str) -> bool:
    """Returns whether two UUIDs name one device. torch leaves out the ``GPU-`` that NVML writes."""
    one, other = (uuid.lower().removeprefix("gpu-").removeprefix("mig-") for uuid in (left, right))
    return one == other


def _chosen(devices: Sequence[GpuFacts], visible: str | None) -> list[GpuFacts]:
    """Returns the devices that the variable names. As in CUDA, the first entry that names none ends the list."""
    # CUDA shows one instance of a card in MIG mode in place of the card.
    instances = {device.nvml_index: device for device in reversed(devices) if device.is_mig}
    cards = [device for device in devices if not device.is_mig]
    stand_ins = [instances.get(card.nvml_index) if card.has_mig_mode else card for card in cards]
    numbered = [device for device in stand_ins if device is not None]
    if visible is None:
        return numbered
    whole = [device for device in devices if not device.has_mig_mode]
    chosen: list[GpuFacts] = []
    for entry in map(str.strip, visible.split(",")):
        if entry.startswith(("GPU-", "MIG-")):
            named = [device for device in whole if (device.uuid or "").startswith(entry)]  # UUIDs may be abbreviated
        else:
            named = [device for number, device in enumerate(numbered) if str(number) == entry]
        if not named:
            break
        chosen.append(named[0])
    return chosen
