"""GPUs as the monitor sees them, and boards with readings."""

from collections.abc import Mapping
from typing import Any

from wellfed.observe.machine_facts import GpuFacts
from wellfed.observe.telemetry.series import HOST, Sample
from wellfed.watch.board import Board

FULL = {
    **{"util_pct": 63.0, "sm_active_pct": 61.4, "mem_used_gib": 35.12, "power_w": 349.6, "temp_c": 55.0},
}


def seen(index: int = 0, name: str = "NVIDIA H200", **facts: Any) -> GpuFacts:
    """Returns a card of 140.5 GiB and 700 W."""
    known = {"nvml_index": index, "power_limit_w": 700.0, "free_gib": 140.5, **facts}
    return GpuFacts(index, f"GPU-{index}", name, 140.5, "9.0", **known)


def sample(time_s: float, gpu: int, values: Mapping[str, float]) -> Sample:
    return Sample(time_s, 0, "train", gpu, values)


def board_of(*gpus: GpuFacts, num_cores: int = 4, ram_gib: float = 62.8, interval_s: float = 0.5) -> Board:
    """Returns a board without readings."""
    return Board(gpus, num_cores=num_cores, ram_gib=ram_gib, interval_s=interval_s)


def filled_board(*gpus: GpuFacts) -> Board:
    """Returns a board with all figures of each GPU and of the host, read at second 1."""
    board = board_of(*gpus)
    board.add([sample(1.0, gpu.index, FULL) for gpu in gpus])
    board.add([sample(1.0, HOST, {"cpu_pct": 148.0, "mem_used_gib": 12.34})])
    return board
