"""Finds which NVML device CUDA numbers 0, 1, ... from CUDA_VISIBLE_DEVICES, without querying CUDA.

Rules: https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/environment-variables.html. For repeated or
malformed entries: torch.cuda._parse_visible_devices of torch 2.13.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from wellfed.observe.nvml.devices import Device, Devices

_LEADING_INTEGER = re.compile(r"[+-]?\d+")


def visible_devices(
    found: Devices,
    *,
    visible: str | None,
    order: str | None,
    torch_uuids: Sequence[str] | None = None,
) -> Devices:
    """Returns the devices that CUDA shows this process, in CUDA's order, with ``index`` filled in.

    Args:
        found: all devices in NVML's order.
        visible: the value of CUDA_VISIBLE_DEVICES; None = not set, "" hides all.
        order: the value of CUDA_DEVICE_ORDER; None = not set.
        torch_uuids: ``torch.cuda.get_device_properties(i).uuid`` as text, by torch's index. If given, the
            environment variables are ignored.
    """
    if torch_uuids is not None:
        return _by_torch(found, torch_uuids)
    ordinals, notes = _ordinals(found.devices), list(found.notes)
    by_number = visible is None or not visible.startswith(("GPU-", "MIG-"))
    if visible is None:
        chosen = ordinals
    else:
        chosen = _by_number(ordinals, visible) if by_number else _by_uuid(found.devices, visible)
    if by_number and chosen and order != "PCI_BUS_ID" and len({card.name for card in ordinals}) > 1:
        names = ", ".join(dict.fromkeys(card.name for card in ordinals))
        notes.append(
            f"the cards differ ({names}) and CUDA_DEVICE_ORDER={order or '(not set)'} numbers the fastest first, so "
            "NVML's order may not be CUDA's. Run: export CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    numbers = {card.nvml_index for card in found.devices}
    if by_number and numbers != set(range(len(numbers))):
        notes.append("a card is left out, so CUDA's numbers may be others. Set CUDA_VISIBLE_DEVICES by UUID.")
    # A process gets one MIG instance, however many it names:
    first_mig = next((device for device in chosen if device.is_mig), None)
    kept = [device for device in chosen if not device.is_mig or device is first_mig]
    return Devices(tuple(replace(device, index=index) for index, device in enumerate(kept)), tuple(notes))


def same_uuid(left: str, right: str) -> bool:
    """Returns whether two UUIDs name one device. torch leaves out the ``GPU-`` that NVML writes."""
    one, other = (uuid.lower().removeprefix("gpu-").removeprefix("mig-") for uuid in (left, right))
    return one == other


def _by_torch(found: Devices, torch_uuids: Sequence[str]) -> Devices:
    # Some torch builds report a split card itself instead of its instance.
    devices, notes = [], list(found.notes)
    for index, uuid in enumerate(torch_uuids):
        match = next((device for device in found.devices if same_uuid(device.uuid, uuid)), None)
        if match is None:
            notes.append(f"torch's device {index} ({uuid}) is not among NVML's; its figures are absent.")
        else:
            devices.append(replace(match, index=index))
    return Devices(tuple(devices), tuple(notes))


def _ordinals(devices: Sequence[Device]) -> list[Device]:
    """Returns the devices that plain numbers count. The first instance replaces a card in MIG mode. A split card
    without instances is not a CUDA device."""
    instances = {device.nvml_index: device for device in reversed(devices) if device.is_mig}
    cards = (device for device in devices if not device.is_mig)
    stand_ins = (instances.get(card.nvml_index) if card.has_mig_mode else card for card in cards)
    return [device for device in stand_ins if device is not None]


def _by_number(ordinals: Sequence[Device], visible: str) -> list[Device]:
    numbers: list[int] = []
    for entry in visible.split(","):
        match = _LEADING_INTEGER.match(entry.strip())  # CUDA reads with strtoul: "1gpu" is 1
        number = int(match.group()) if match else -1
        if number in numbers:
            return []  # a repeated entry hides all
        if not 0 <= number < len(ordinals):
            break  # the first invalid entry ends the list
        numbers.append(number)
    return [ordinals[number] for number in numbers]


def _by_uuid(devices: Sequence[Device], visible: str) -> list[Device]:
    chosen: list[Device] = []
    for entry in visible.split(","):
        if not entry.startswith(visible[:4]):
            break  # kinds can't be mixed
        matches = [device for device in devices if device.uuid.startswith(entry)]
        if len(matches) != 1 or matches[0].has_mig_mode:
            break  # unknown, ambiguous, or a split card
        if matches[0] in chosen:
            return []
        chosen.append(matches[0])
    return chosen
