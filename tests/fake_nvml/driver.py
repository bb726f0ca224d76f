"""A stand-in for the driver's library libnvidia-ml.so.1: what it can be told to answer, and how it is built and loaded.

Unlike ``scripted`` it stands below pynvml, so the real module, its structures and its loading run too. ``driver.c``
says what each function answers. Times are seconds since the first nvmlInit, on a clock that
:meth:`LoadedDriver.advance` turns forward without waiting.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).with_name("driver.c")
STATE = SOURCE.parents[1] / "fake_cuda" / "machine_state.h"
SONAME = "libnvidia-ml.so.1"
FUNCTIONS = frozenset(
    re.findall(r"^(?:EXPORT (?:nvmlReturn_t |const char \*)|FIGURE\()(nvml\w+)", SOURCE.read_text(), re.MULTILINE)
)
"""What the library exports, by the names of C: ``nvmlDeviceGetCount_v2``."""

GIB = 2**30
FOREVER = math.inf
INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND = 2, 3, 4, 6
DRIVER_NOT_LOADED, GPU_IS_LOST, MISMATCH, NO_DATA, UNKNOWN = 9, 15, 18, 21, 999
SM_ACTIVE, SM_OCCUPANCY, TENSOR_ACTIVE, DRAM_ACTIVE, PCIE_TX, PCIE_RX = 2, 3, 5, 10, 20, 21
"""Numbers of GPM metrics."""


@dataclass(frozen=True)
class Wave:
    """A square wave: ``high`` for the first ``duty_frac`` of each period, else ``low``. Starts high at second 0."""

    period_s: float
    duty_frac: float = 0.5
    low: float = 0.0
    high: float = 100.0

    def __post_init__(self) -> None:
        if not (self.period_s > 0 and 0 <= self.duty_frac <= 1):
            raise ValueError(f"not a wave: {self}")


@dataclass(frozen=True)
class Failing:
    """An error code from one second to another; code 0 = answers, where it would refuse by default."""

    code: int
    from_s: float = 0.0
    to_s: float = FOREVER


@dataclass(frozen=True)
class Lost:
    """Every call about the card answers "GPU is lost" in that time.

    With ``needs_init`` it is back only for those who close NVML and open it again after ``to_s``.
    """

    from_s: float = 0.0
    to_s: float = FOREVER
    needs_init: bool = False


@dataclass(frozen=True)
class Hang:
    """A function (C's name) that takes ``for_s`` seconds from second ``from_s`` on; the first time only with once."""

    function: str
    for_s: float
    from_s: float = 0.0
    once: bool = False


Errors = Mapping[str, int | Failing | Sequence[Failing]]
"""C's name of a function -> the code it always answers, or the times when it does."""


@dataclass
class FakeMig:
    """A MIG instance. Its handle answers what it is and its memory; the rest is NOT_SUPPORTED, as the driver's."""

    uuid: str
    name: str = "NVIDIA H200 MIG 1g.18gb"
    total_gib: float = 16.0
    used_gib: float = 0.0
    reserved_gib: float = 0.0
    gpu_instance_id: int = 1
    compute_instance_id: int = 0
    util: float | Wave = 0.0
    """Seen through GPM alone."""
    errors: Errors = field(default_factory=dict)


@dataclass
class FakeGpu:
    """A card."""

    uuid: str = "GPU-aaaa1111-0000-0000-0000-000000000001"
    name: str = "NVIDIA H200"
    total_gib: float = 80.0
    used_gib: float = 0.0
    reserved_gib: float = 0.0
    capability: tuple[int, int] = (9, 0)
    util: float | Wave = 0.0
    """Percent: GetUtilizationRates gives it at a moment, GPM the mean between two."""
    memory_util: float | Wave = 0.0
    power_w: float | Wave = 100.0
    power_limit_w: float = 0.0
    """0 = it does not tell."""
    temp_c: int = 40
    sm_clock_mhz: int = 1500
    mem_clock_mhz: int = 2600
    pcie_rx_kb_s: int = 0
    pcie_tx_kb_s: int = 0
    pcie_generation: int = 5
    pcie_width: int = 16
    max_pcie_generation: int = 5
    max_pcie_width: int = 16
    event_reasons: int = 0
    has_energy: bool = True
    """Energy is the integral of the power, from ``energy_start_j``."""
    energy_start_j: float = 0.0
    gpm: bool = False
    gpm_scales: Mapping[int, float] = field(
        default_factory=lambda: {
            SM_ACTIVE: 1.0,
            SM_OCCUPANCY: 0.5,
            TENSOR_ACTIVE: 0.25,
            DRAM_ACTIVE: 0.75,
            PCIE_TX: 1.0,
            PCIE_RX: 1.0,
        }
    )
    """Metric -> share of ``util`` it gives (20, 21: of PCIe in MiB/s). What is not here answers NOT_SUPPORTED."""
    gpm_errors: Mapping[int, int] = field(default_factory=dict)
    """Metric -> code in its nvmlReturn."""
    lost: Lost | None = None
    mig: Sequence[FakeMig | None] | None = None
    """By slot, None = an empty slot; None = the card is not in MIG mode."""
    mig_capable: bool = False
    """Without MIG mode: GetMigMode answers "off" (as on an H200) and not NOT_SUPPORTED (as on an RTX)."""
    processes: Sequence[tuple[int, float] | tuple[int, float, str]] = ()
    """(pid, GiB, path) of what GetComputeRunningProcesses lists; without a path SystemGetProcessName knows no name."""
    errors: Errors = field(default_factory=dict)
    simulated_card: int | None = None
    """The card of this number, from 0, in the simulated machine of FAKE_CUDA_STATE: how busy it is, its memory,
    processes, PCIe and loss are what it does. Of ``util``, ``memory_util`` and ``power_w``, which are waves then,
    ``low`` is what an idle card shows and ``high`` what a busy one does; clocks fall where it rests."""


@dataclass
class Scenario:
    """A machine. Device calls are those that take a handle or find one."""

    gpus: Sequence[FakeGpu] = ()
    driver: str = "580.65.06"
    nvml: str = "13.580.65.06"
    init_error: int = 0
    """What nvmlInit answers, e.g. DRIVER_NOT_LOADED or MISMATCH."""
    slow_ms: float = 0.0
    """How long each device call takes, from ``slow_from_s`` on."""
    slow_from_s: float = 0.0
    fail_every: int = 0
    """Each device call of that number, counted over all threads, answers ``fail_code``; 0 = none."""
    fail_code: int = UNKNOWN
    hangs: Sequence[Hang] = ()
    rate_period_s: float = 1 / 6
    """Seconds that GetUtilizationRates covers on a simulated card."""
    errors: Errors = field(default_factory=dict)
    """For calls about no device, and for every device."""

    def write(self, path: Path) -> Path:
        """Writes the file that FAKE_NVML_SCENARIO names.

        Raises:
            ValueError: a function that the library does not have, or a text of more than one line.
        """
        lines = [f"{key} {getattr(self, key)}" for key in _SCENARIO_KEYS]
        lines += [f"hang {_known(h.function)} {h.for_s} {h.from_s} {h.once:d}" for h in self.hangs]
        lines += _error_lines(self.errors)
        for gpu in self.gpus:
            lines += _gpu_lines(gpu)
        if any("\n" in line for line in lines):
            raise ValueError("a text in a scenario must be one line")
        path.write_bytes(os.fsencode("\n".join(lines) + "\n"))
        return path


_SCENARIO_KEYS = (
    *("driver", "nvml", "init_error", "slow_ms", "slow_from_s"),
    *("fail_every", "fail_code", "rate_period_s"),
)
_GPU_KEYS = (
    *("temp_c", "sm_clock_mhz", "mem_clock_mhz", "pcie_rx_kb_s", "pcie_tx_kb_s", "pcie_generation", "pcie_width"),
    *("max_pcie_generation", "max_pcie_width", "event_reasons", "energy_start_j", "power_limit_w"),
)


def _gpu_lines(gpu: FakeGpu) -> list[str]:
    lines = [f"gpu {gpu.uuid}", *_body_lines(gpu, gpu)]
    lines += [f"{key} {getattr(gpu, key)}" for key in _GPU_KEYS]
    lines += [f"memory_util {_wave(gpu.memory_util)}", f"power_w {_wave(gpu.power_w)}"]
    lines += [f"has_energy {gpu.has_energy:d}"]
    lines += [f"simulated {0 if gpu.simulated_card is None else gpu.simulated_card + 1}"]
    lines += [f"mig_mode {gpu.mig is not None:d}", f"mig_capable {gpu.mig_capable or gpu.mig is not None:d}"]
    lines += [" ".join([f"process {pid} {_bytes(gib)}", *name]) for pid, gib, *name in gpu.processes]
    if gpu.lost is not None:
        lines += [f"lost_from_s {gpu.lost.from_s}", f"lost_to_s {gpu.lost.to_s}"]
        lines += [f"lost_needs_init {gpu.lost.needs_init:d}"]
    for slot, mig in enumerate(gpu.mig or ()):
        if mig is not None:
            lines += [f"mig {mig.uuid}", f"slot {slot}", *_body_lines(mig, gpu)]
            lines += [f"gpu_instance_id {mig.gpu_instance_id}", f"compute_instance_id {mig.compute_instance_id}"]
    return lines


def _body_lines(device: FakeGpu | FakeMig, card: FakeGpu) -> list[str]:
    """What cards and instances have alike."""
    sizes = {name: getattr(device, f"{name}_gib") for name in ("total", "used", "reserved")}
    scales = {**dict.fromkeys(card.gpm_errors, 0.0), **card.gpm_scales}
    return [
        f"name {device.name}",
        *(f"{name}_bytes {_bytes(gib)}" for name, gib in sizes.items()),
        f"major {card.capability[0]}",
        f"minor {card.capability[1]}",
        f"util {_wave(device.util)}",
        f"gpm {card.gpm:d}",
        *(f"metric {number} {scale} {card.gpm_errors.get(number, 0)}" for number, scale in scales.items()),
        *_error_lines(device.errors),
    ]


def _error_lines(errors: Errors) -> list[str]:
    lines = []
    for function, answer in errors.items():
        always = [Failing(answer)] if isinstance(answer, int) else answer
        failings = [always] if isinstance(always, Failing) else always
        lines += [f"error {_known(function)} {failing.code} {failing.from_s} {failing.to_s}" for failing in failings]
    return lines


def _known(function: str) -> str:
    if function not in FUNCTIONS:
        raise ValueError(f"the fake driver has no function {function}; it has {', '.join(sorted(FUNCTIONS))}")
    return function


def _wave(value: float | Wave) -> str:
    wave = value if isinstance(value, Wave) else Wave(1.0, 1.0, value, value)
    return f"{wave.period_s} {wave.duty_frac} {wave.low} {wave.high}"


def _bytes(gib: float) -> int:
    return round(gib * GIB)


def build(cc: Path, folder: Path, without: Sequence[str] = (), *, soname: str | None = SONAME) -> Path:
    """The compiled library, named libnvidia-ml.so.1, in a folder of its own below ``folder``; compiled once.

    Args:
        cc: a C compiler.
        folder: where to keep what is built.
        without: functions (C's names) that the library is not to have.
        soname: None = a library that only its path finds, never a later dlopen of its name.
    """
    # A function that is renamed is one that nobody finds.
    flags = [f"-D{_known(function)}=fake_absent_{function}" for function in sorted(without)]
    flags += [f"-Wl,-soname,{soname}"] if soname else []
    key = hashlib.sha256("\n".join([SOURCE.read_text(), STATE.read_text(), *flags]).encode()).hexdigest()[:12]
    library = folder / key / SONAME
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    unfinished = library.with_name(f"{os.getpid()}.so")
    command: list[str | Path] = [
        cc,
        "-shared",
        "-fPIC",
        "-O1",
        "-std=c11",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-fvisibility=hidden",
    ]
    command += [*flags, SOURCE, "-o", unfinished, "-pthread", "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{cc} can't build {SOURCE}:\n{done.stderr}")
    unfinished.replace(library)
    return library


class LoadedDriver:
    """The library in this process: its clock and what it counts."""

    def __init__(self, library: Path) -> None:
        self._lib = ctypes.CDLL(str(library))
        self._lib.fake_nvml_elapsed_s.restype = ctypes.c_double
        self._lib.fake_nvml_num_calls.restype = ctypes.c_ulong
        self._library = library
        self._num_written = 0

    @property
    def lib(self) -> ctypes.CDLL:
        """What stands in for ``pynvml.nvmlLib``."""
        return self._lib

    def switch(self, scenario: Scenario) -> None:
        """Plays another scenario: at once while NVML is open, else on a new clock from the next nvmlInit on.

        Devices keep their handles by their position among cards and instances.
        """
        self._num_written += 1
        path = scenario.write(self._library.with_suffix(f".{self._num_written}.txt"))
        if self._lib.fake_nvml_load(os.fsencode(path)) != 0:
            raise RuntimeError(f"the fake driver does not understand {path}")

    def advance(self, seconds: float) -> None:
        """Lets time pass for the driver; its epoch timestamps run ahead by as much."""
        self._lib.fake_nvml_advance(ctypes.c_double(seconds))

    def elapsed_s(self) -> float:
        """Seconds since the first nvmlInit."""
        return float(self._lib.fake_nvml_elapsed_s())

    def num_calls(self, function: str) -> int:
        """Calls of a function (C's name) since the scenario was loaded."""
        return int(self._lib.fake_nvml_num_calls(_known(function).encode()))

    def num_users(self) -> int:
        """nvmlInit without their nvmlShutdown."""
        return int(self._lib.fake_nvml_num_users())

    def num_gpm_samples(self) -> int:
        """GPM samples allocated and not freed."""
        return int(self._lib.fake_nvml_num_gpm_samples())


class FakeDriver:
    """The library for subprocesses and for this process; the fixture ``fake_driver``.

    Subprocesses find it by LD_LIBRARY_PATH (:meth:`environment`). In this process :meth:`load` puts it in pynvml's
    place of the driver's library for a ``with`` block, whatever pynvml has loaded before.
    """

    def __init__(self, cc: Path, folder: Path, without: Sequence[str] = ()) -> None:
        self._cc = cc
        self._folder = folder
        self._without = tuple(without)

    @property
    def library(self) -> Path:
        """libnvidia-ml.so.1."""
        return build(self._cc, self._folder, self._without)

    def without(self, *functions: str) -> FakeDriver:
        """The same driver lacking these functions (C's names), as an older one does."""
        return FakeDriver(self._cc, self._folder, (*self._without, *functions))

    def environment(self, scenario: Scenario, *, report: Path | None = None) -> dict[str, str]:
        """This process's environment, changed so that a subprocess finds the driver, plus the scenario's path.

        Args:
            scenario: what it plays.
            report: a file that gets ``pid name number`` lines as the process ends, see :func:`read_report`.
        """
        changed = {
            "LD_LIBRARY_PATH": str(self.library.parent),
            "FAKE_NVML_SCENARIO": str(scenario.write(self._new_folder() / "scenario.txt")),
        }
        if os.environ.get("LD_LIBRARY_PATH"):
            changed["LD_LIBRARY_PATH"] += os.pathsep + os.environ["LD_LIBRARY_PATH"]
        if report is not None:
            changed["FAKE_NVML_REPORT"] = str(report)
        return {**os.environ, **changed}

    def _new_folder(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self._folder))

    @contextmanager
    def load(self, scenario: Scenario) -> Iterator[LoadedDriver]:
        """pynvml in this process asks the fake driver while the block lasts; then what it asked before.

        It is found by its path alone: a dlopen of libnvidia-ml.so.1 in this process still gets the machine's own.
        """
        import pynvml

        # A copy for each block: state that one test leaves behind, also in a thread that hangs, is not the next one's.
        # Never twice at one path: writing over a library that is loaded ends the process.
        library = build(self._cc, self._folder, self._without, soname=None)
        driver = LoadedDriver(Path(shutil.copy(library, self._new_folder())))
        driver.switch(scenario)
        found_before, pynvml.nvmlLib = pynvml.nvmlLib, driver.lib
        pynvml._nvmlGetFunctionPointer_cache.clear()
        try:
            yield driver
        finally:
            pynvml.nvmlLib = found_before
            pynvml._nvmlGetFunctionPointer_cache.clear()


def read_report(path: Path) -> list[dict[str, int]]:
    """What each process left in the report: calls by C's name of the function, ``users`` and ``gpm_samples``."""
    processes: dict[str, dict[str, int]] = {}
    for line in path.read_text().splitlines():
        pid, name, number = line.split()
        processes.setdefault(pid, {})[name] = int(number)
    return list(processes.values())
