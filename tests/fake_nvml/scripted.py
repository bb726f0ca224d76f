"""A stand-in for the pynvml module, with cards that a test writes down.

Only what the code asks of pynvml; ``test_scripted`` holds the names and arguments to those of the real module.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

from pynvml import NVMLError

GIB = 2**30
NOT_SUPPORTED, NOT_FOUND, FUNCTION_NOT_FOUND, GPU_IS_LOST = 3, 6, 13, 15


@dataclass
class Card:
    uuid: str = "GPU-aaaa1111-0000-0000-0000-000000000001"
    name: str = "NVIDIA H200"
    total_bytes: int = 80 * GIB
    used_bytes: int = 0
    reserved_bytes: int = 0
    capability: tuple[int, int] = (9, 0)
    slots: list[Card | None] | None = None
    """MIG slots; None = the card is not in MIG mode."""
    errors: dict[str, int] = field(default_factory=dict)
    """Function name -> NVML error code that it answers for this card."""


class ScriptedNvml:
    NVMLError = NVMLError
    nvmlMemory_v2 = 0x02000028  # noqa: N815

    def __init__(self, *cards: Card, driver: str = "580.65", errors: dict[str, int] | None = None) -> None:
        self.cards = list(cards)
        self.driver = driver
        self.errors = errors or {}
        self.num_open = 0

    def nvmlInit(self):
        self._may("nvmlInit")
        self.num_open += 1

    def nvmlShutdown(self):
        self.num_open -= 1
        self._may("nvmlShutdown")

    def nvmlSystemGetDriverVersion(self):
        self._may("nvmlSystemGetDriverVersion")
        return self.driver

    def nvmlDeviceGetCount(self):
        self._may("nvmlDeviceGetCount")
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index):
        self._may("nvmlDeviceGetHandleByIndex", self.cards[index])
        return self.cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        for card in self.cards:
            for device in [card, *(slot for slot in card.slots or [] if slot)]:
                if device.uuid == uuid:
                    return device
        raise NVMLError(NOT_FOUND)

    def nvmlDeviceGetUUID(self, handle):
        self._may("nvmlDeviceGetUUID", handle)
        return handle.uuid

    def nvmlDeviceGetName(self, handle):
        self._may("nvmlDeviceGetName", handle)
        return handle.name

    def nvmlDeviceGetMemoryInfo(self, handle, version=None):
        self._may("nvmlDeviceGetMemoryInfo", handle)
        free = handle.total_bytes - handle.used_bytes - handle.reserved_bytes
        if version is None:
            return SimpleNamespace(total=handle.total_bytes, used=handle.used_bytes + handle.reserved_bytes, free=free)
        self._may("nvmlDeviceGetMemoryInfo_v2", handle)
        return SimpleNamespace(
            total=handle.total_bytes, used=handle.used_bytes, reserved=handle.reserved_bytes, free=free
        )

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        self._may("nvmlDeviceGetCudaComputeCapability", handle)
        return handle.capability

    def nvmlDeviceGetMigMode(self, device):
        self._may("nvmlDeviceGetMigMode", device)
        return [0, 0] if device.slots is None else [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, device):
        return len(device.slots or [])

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device, index):
        slot = device.slots[index]
        if slot is None:
            raise NVMLError(NOT_FOUND)
        return slot

    def _may(self, function, card=None):
        code = self.errors.get(function) or (card.errors.get(function) if card else None)
        if code:
            raise NVMLError(code)
