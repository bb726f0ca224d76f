"""Stand-ins that the tests of this room share."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.fake_nvml.driver import FakeGpu, LoadedDriver
from wellfed.observe.machine_facts import GpuFacts
from wellfed.observe.telemetry.gpu import GpuSource
from wellfed.observe.telemetry.run_progress import Progress
from wellfed.observe.telemetry.sampler import Sampler
from wellfed.observe.telemetry.series import Reading, Sample


def h200(uuid: str = "GPU-1", **facts: object) -> FakeGpu:
    """A card that offers everything; its figures differ so that none can stand for another."""
    figures = {
        **{"total_gib": 141, "used_gib": 5, "reserved_gib": 0.5, "util": 60, "memory_util": 35, "power_w": 350.5},
        **{"temp_c": 55, "sm_clock_mhz": 1980, "mem_clock_mhz": 3201, "event_reasons": 0x4, "gpm": True},
        **{"pcie_rx_kb_s": 1024 * 2000, "pcie_tx_kb_s": 1024 * 300, "mig_capable": True},
    }
    return FakeGpu(uuid, "NVIDIA H200", **{**figures, **facts})


def watched_gpu(index: int, uuid: str, *, is_mig: bool = False) -> GpuFacts:
    """A GPU to watch."""
    return GpuFacts(index, uuid, "card", None, None, nvml_index=0, is_mig=is_mig)


def a100(uuid: str = "GPU-1", **facts: object) -> FakeGpu:
    """The same without GPM."""
    return h200(uuid, **{"gpm": False, **facts})


@dataclass
class Watched:
    """A GpuSource read by hand."""

    driver: LoadedDriver
    source: GpuSource
    events: list[dict[str, object]]

    def read(self, *, slow: bool = True, edge: bool = False) -> dict[int, dict[str, float]]:
        """Returns the figures by GPU."""
        return {gpu: dict(values) for gpu, values in self.source.read(slow=slow, edge=edge)}

    def later(self, seconds: float = 5.0, *, slow: bool = True) -> dict[int, dict[str, float]]:
        """Reads after this time."""
        self.driver.advance(seconds)
        return self.read(slow=slow)

    def kinds(self) -> list[object]:
        """Returns the kind of each event."""
        return [event.get("trouble", event["kind"]) for event in self.events]

    def end(self) -> None:
        """Closes the source, and checks that it holds nothing of the driver."""
        self.source.close()
        assert self.driver.num_gpm_samples() == 0
        assert self.driver.num_users() == 0


@dataclass
class Heard:
    """Samples and events that a sampler handed over."""

    samples: list[Sample] = field(default_factory=list)
    events: list[dict[str, object]] = field(default_factory=list)

    def sampler(self, **options: Any) -> Sampler:
        """Returns a sampler without sources."""
        given = {"interval_s": 0.5, "progress": Progress(), "time_s": time.monotonic, "take": self.samples.extend}
        return Sampler(**{**given, "on_event": self.add_event, **options})

    def add_event(self, kind: str, **facts: object) -> None:
        """Keeps an event."""
        self.events.append({"kind": kind, **facts})

    def of(self, gpu: int) -> list[Sample]:
        """Returns the samples of one GPU, or of the host."""
        return [sample for sample in list(self.samples) if sample.gpu == gpu]

    def troubles(self) -> list[object]:
        """Returns the kind of each event."""
        return [event.get("trouble", event["kind"]) for event in list(self.events)]


class ScriptedSource:
    """A source that gives ``{"x": number of the reading}``, hangs while ``gate`` is shut and does ``then`` before."""

    def __init__(self, gpu: int = 0, *, then: Callable[[], object] = lambda: None, name: str = "gpu") -> None:
        self.name = name
        self._gpu, self._then = gpu, then
        self.reads: list[bool | str] = []
        self.gate, self.is_closed = threading.Event(), threading.Event()
        self.gate.set()

    def read(self, *, slow: bool, edge: bool = False) -> Sequence[Reading]:
        """``slow`` is noted, or that it is an edge."""
        self.reads.append("edge" if edge else slow)
        number = len(self.reads)
        self._then()
        self.gate.wait(30)
        return [Reading(self._gpu, {"x": number})]

    def close(self) -> None:
        """Is noted."""
        self.is_closed.set()


def until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Wait for something that another thread or process does; how soon is not the point."""
    give_up_at_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at_s, "it never came"
        time.sleep(0.001)
