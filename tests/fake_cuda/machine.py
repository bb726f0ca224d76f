"""The simulated CUDA machine for tests: what its cards are like, and how a test or a command gets them."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fake_nvml.driver import (
    DRAM_ACTIVE,
    PCIE_RX,
    PCIE_TX,
    SM_ACTIVE,
    SM_OCCUPANCY,
    TENSOR_ACTIVE,
    FakeDriver,
    FakeGpu,
    Scenario,
    Wave,
)

SITE = Path(__file__).with_name("site")
"""On PYTHONPATH it gives a Python its cards."""
INSIDE = Path(__file__).with_name("inside.py")


MODELS: dict[str, dict[str, Any]] = {
    "small": {"tflops": 0.003, "tensor_tflops": 0.012, "dram_gbps": 2.0, "sms": 32, "kernel_us": 20.0},
    "wide": {"tflops": 0.003, "tensor_tflops": 0.012, "dram_gbps": 2.0, "sms": 256, "kernel_us": 20.0},
    "fast": {
        **{"tflops": 20.0, "tensor_tflops": 80.0, "dram_gbps": 600.0, "sms": 82, "kernel_us": 3.0},
        "computes": False,
    },
}
"""Fields of `Cards` with a roofline. "fast" has rates like those of a real card of 24 GB, and its results are no
numbers. The others are some ten times slower than one core of a host, so that the host's own time does not count. As on
real cards tensor cores are several times as fast, a kernel needs thousands of elements to fill one (32 Ki of "small",
256 Ki of "wide", millions there), and some operations a byte to be bound by its arithmetic."""


@dataclass(frozen=True)
class Cards:
    """Cards of a kind, as the variables FAKE_CUDA_* describe them (README.md)."""

    cards: int = 1
    mib: int = 1024
    """Memory of a card; beyond it torch.OutOfMemoryError."""
    context_mib: int = 0
    """What a process takes of it by using the card at all; some 500 on a real one."""
    others_mib: int = 0
    """What processes hold that are not simulated."""
    slowdown: float = 1.0
    """A kernel takes so many times the time that it takes the host; above 1 a card lags behind the host."""
    kernel_us: float = 0.0
    """And so much more."""
    launch_us: float = 0.0
    """What a launch takes of the host before the card gets it; some 5 on a real one."""
    copy_gbps: float = 0.0
    """GB/s of copies between pinned memory and the card; 0 = they take no time."""
    pageable_gbps: float = 0.0
    """Of memory that is not pinned; 0 = the same."""
    tflops: float = 0.0
    """TFLOP/s of float32; 0 = a kernel takes the host's time, else the longer of its arithmetic and its bytes."""
    tensor_tflops: float = 0.0
    """Of 16-bit types on tensor cores, TF32 half of it; 0 = the card has none."""
    dram_gbps: float = 0.0
    """GB/s of the card's memory; 0 = it takes no time."""
    sms: int = 32
    """Multiprocessors, which a kernel of few elements does not fill."""
    computes: bool = True
    """False = kernels leave the card's memory as it is and take the time of the roofline: a card faster than the host,
    whose results are no numbers. For how a card is fed, never for what is learned."""
    capability: str = "9.0"
    """NVML has GPM from 9.0 on."""
    throttle: str = ""
    """``10:0.5:heat``: after 10 busy seconds the clock falls to half; ``power`` = by the power limit."""
    strict: bool = False
    """An access that nothing orders raises at once."""
    lost_after: int | str = ""
    """Launches after which every card is lost; by card ``1:1000``; empty = never."""

    def variables(self) -> dict[str, str]:
        """FAKE_CUDA_* that say so."""
        return {
            "FAKE_CUDA_DEVICES": str(self.cards),
            "FAKE_CUDA_MIB": str(self.mib),
            "FAKE_CUDA_CONTEXT_MIB": str(self.context_mib),
            "FAKE_CUDA_OTHERS_MIB": str(self.others_mib),
            "FAKE_CUDA_SLOWDOWN": str(self.slowdown),
            "FAKE_CUDA_KERNEL_US": str(self.kernel_us),
            "FAKE_CUDA_LAUNCH_US": str(self.launch_us),
            "FAKE_CUDA_COPY_GBPS": str(self.copy_gbps),
            "FAKE_CUDA_PAGEABLE_GBPS": str(self.pageable_gbps),
            "FAKE_CUDA_TFLOPS": str(self.tflops),
            "FAKE_CUDA_TENSOR_TFLOPS": str(self.tensor_tflops),
            "FAKE_CUDA_SMS": str(self.sms) if self.tflops else "8",
            "FAKE_CUDA_DRAM_GBPS": str(self.dram_gbps),
            "FAKE_CUDA_COMPUTES": str(int(self.computes)),
            "FAKE_CUDA_CAPABILITY": self.capability,
            "FAKE_CUDA_THROTTLE": self.throttle,
            "FAKE_CUDA_STRICT": str(int(self.strict)),
            "FAKE_CUDA_LOST_AFTER": str(self.lost_after),
        }


class FakeCuda:
    """The fixture ``fake_cuda``; its driver is compiled."""

    def environment(self, *, report: Path | None = None, state: Path | None = None, **cards: Any) -> dict[str, str]:
        """Variables with which a command finds `Cards` of that kind.

        Args:
            report: a file that gets a line of JSON from each process at its end: ``violations``, ``contexts``, counts.
            state: the file that makes processes share the cards' memory (machine_state.h); made by the first of them.
            cards: fields of `Cards`.
        """
        paths = {"FAKE_CUDA_REPORT": report, "FAKE_CUDA_STATE": state}
        return self.of(Cards(**cards)) | {name: str(path) for name, path in paths.items() if path is not None}

    def of(self, cards: Cards) -> dict[str, str]:
        """Variables with which a command finds these cards."""
        before = os.environ.get("PYTHONPATH")
        return cards.variables() | {"PYTHONPATH": os.pathsep.join([str(SITE), *([before] if before else [])])}


def machine_environment(
    driver: FakeDriver, folder: Path, cards: Cards, *, sm_share_frac: float = 1.0
) -> dict[str, str]:
    """Variables with which commands find one machine: the cards, and NVML that shows what they do.

    Args:
        folder: holds what the processes of the machine share; one machine a folder.
        sm_share_frac: share of its multiprocessors that a busy card uses.
    """
    gib = cards.mib / 1024
    major, minor = map(int, cards.capability.split("."))
    scales = {SM_ACTIVE: sm_share_frac, SM_OCCUPANCY: sm_share_frac / 2, PCIE_TX: 1.0, PCIE_RX: 1.0}
    if cards.tflops:
        scales |= {TENSOR_ACTIVE: 1.0, DRAM_ACTIVE: 1.0}
    gpus = [
        FakeGpu(
            uuid=f"GPU-aaaa1111-0000-0000-0000-{number + 1:012d}",
            name=f"Simulated GPU {gib:g} GiB",
            total_gib=gib,
            util=Wave(1.0),
            memory_util=Wave(1.0, high=60),
            power_w=Wave(1.0, low=60, high=350),
            power_limit_w=350,
            capability=(major, minor),
            gpm=major >= 9,
            gpm_scales=scales,
            simulated_card=number,
        )
        for number in range(cards.cards)
    ]
    whole = driver.environment(Scenario(gpus))
    shown = {name: whole[name] for name in ("LD_LIBRARY_PATH", "FAKE_NVML_SCENARIO")}
    return FakeCuda().of(cards) | shown | {"FAKE_CUDA_STATE": str(folder / "machine")}


def compile_driver() -> None:
    """Have the driver compiled, unless it is.

    Raises:
        RuntimeError: it can't be; with what the compiler said.
    """
    command = [sys.executable, "-c", "from fake_cuda.build import compiled; compiled()"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(SITE)}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
