"""Reads the file of FAKE_CUDA_STATE: machine_state.h in Python."""

import ctypes
import mmap
import os
from pathlib import Path

MAX_CARDS, MAX_PROCESSES, UUID_SIZE, NUM_SLICES, SLICE_NS, BUSY_BITS = 8, 16, 48, 32768, 1_000_000, 20


class _Share(ctypes.Structure):
    _fields_ = (
        ("has_context", ctypes.c_uint64),
        ("reserved_bytes", ctypes.c_uint64),
        ("busy_ns", ctypes.c_uint64),
        ("num_launches", ctypes.c_uint64),
        ("to_card_bytes", ctypes.c_uint64),
        ("to_host_bytes", ctypes.c_uint64),
        ("slices", ctypes.c_uint64 * NUM_SLICES),
        ("parts", ctypes.c_uint64 * NUM_SLICES),
    )


class _Process(ctypes.Structure):
    _fields_ = (("pid", ctypes.c_uint64), ("cards", _Share * MAX_CARDS))


class _Card(ctypes.Structure):
    _fields_ = (
        ("uuid", ctypes.c_char * UUID_SIZE),
        ("total_bytes", ctypes.c_uint64),
        ("context_bytes", ctypes.c_uint64),
        ("others_bytes", ctypes.c_uint64),
        ("is_lost", ctypes.c_uint64),
        ("has_parts", ctypes.c_uint64),
        ("throttled_from_ns", ctypes.c_uint64),
        ("throttled_clock_pct", ctypes.c_uint64),
        ("is_throttled_by_heat", ctypes.c_uint64),
    )


class _Machine(ctypes.Structure):
    _fields_ = (
        ("magic", ctypes.c_uint64),
        ("num_cards", ctypes.c_uint64),
        ("cards", _Card * MAX_CARDS),
        ("processes", _Process * MAX_PROCESSES),
    )


class MachineState:
    """A machine as it was when this was made."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            self._machine = _Machine.from_buffer_copy(mapped)

    def processes(self, card: int) -> dict[int, int]:
        """Process -> bytes that it has reserved on the card; of those that live."""
        return {
            process.pid: process.cards[card].reserved_bytes
            for process in self._machine.processes
            if process.cards[card].has_context and os.path.exists(f"/proc/{process.pid}")
        }

    def is_lost(self, card: int) -> bool:
        return bool(self._machine.cards[card].is_lost)

    def total(self, card: int, figure: str) -> int:
        """A count over all processes: ``busy_ns``, ``num_launches``, ``to_card_bytes``, ``to_host_bytes``."""
        return sum(getattr(process.cards[card], figure) for process in self._machine.processes)

    def busy_ns(self, card: int, from_ns: int, to_ns: int) -> int:
        """Of whole milliseconds between two times of time.monotonic_ns."""
        found = 0
        for number in range(from_ns // SLICE_NS, to_ns // SLICE_NS + 1):
            words = [process.cards[card].slices[number % NUM_SLICES] for process in self._machine.processes]
            busy = sum(word & (1 << BUSY_BITS) - 1 for word in words if word >> BUSY_BITS == number)
            found += min(busy, SLICE_NS)
        return found
