"""Serves the monitor's figures for Prometheus (``wellfed monitor --serve``). Needs the extra ``serve``.

GPUs and host are those of the monitor's `Board`, so a scrape reads nothing itself. Runs of this host are read from
their files, as `wellfed diagnose` does, in a thread of their own. Names follow Prometheus' conventions: base units,
shares from 0 to 1 as ``_ratio``, growing counts as ``_total``. docs/prometheus.md lists them.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Self

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from wellfed import __version__
from wellfed.config.files.folder_lookup import RUN
from wellfed.errors import ConfigError
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_rules import conclude
from wellfed.monitor.board import Board
from wellfed.monitor.seen_gpus import SeenGpu
from wellfed.observe.telemetry.machines import HOST
from wellfed.observe.telemetry.ticker import Ticker
from wellfed.units import GIB, show_line

DASHBOARD = Path(__file__).with_name("grafana_dashboard.json")
RUNS_S = 10.0
"""Least seconds between two readings of the runs' files."""
_MOST_FRAC = 0.02
"""Largest share of a core that reading them may take; long runs are read less often."""
_HEAD_BYTES = 4096
"""Bytes of a record that show whether the run has ended."""


@dataclass(frozen=True)
class _Figure:
    name: str
    """Name behind ``wellfed_``, without the ``_total`` of a counter."""
    text: str
    factor: float = 1.0
    """Unit of the reading in Prometheus' unit."""
    is_counter: bool = False


_OF_GPU = {
    "util_pct": _Figure("gpu_utilization_ratio", "Share of time in which any kernel ran.", 0.01),
    "mem_util_pct": _Figure("gpu_memory_utilization_ratio", "Share of time in which memory was read or written.", 0.01),
    "mem_used_gib": _Figure("gpu_memory_used_bytes", "Device memory held by all processes.", GIB),
    "sm_active_pct": _Figure("gpu_sm_active_ratio", "Share of the multiprocessors at work.", 0.01),
    "sm_occupancy_pct": _Figure("gpu_sm_occupancy_ratio", "Warps in flight against the most possible.", 0.01),
    "tensor_active_pct": _Figure("gpu_tensor_active_ratio", "Share of time in which tensor cores were at work.", 0.01),
    "dram_active_pct": _Figure("gpu_dram_active_ratio", "Device memory bandwidth in use against the most.", 0.01),
    "pcie_rx_mb_s": _Figure("gpu_pcie_received_bytes_per_second", "From host to device over PCIe.", 1e6),
    "pcie_tx_mb_s": _Figure("gpu_pcie_sent_bytes_per_second", "From device to host over PCIe.", 1e6),
    "power_w": _Figure("gpu_power_watts", "Mean power since the reading before."),
    "energy_j": _Figure("gpu_energy_joules", "Energy since the monitor began.", is_counter=True),
    "temp_c": _Figure("gpu_temperature_celsius", "Temperature of the die."),
    "sm_clock_mhz": _Figure("gpu_sm_clock_hertz", "Clock of the multiprocessors.", 1e6),
    "mem_clock_mhz": _Figure("gpu_memory_clock_hertz", "Clock of the device memory.", 1e6),
    "power_limited": _Figure("gpu_power_limited", "1 = a power limit holds the clocks down."),
    "heat_limited": _Figure("gpu_heat_limited", "1 = temperature holds the clocks down."),
}
"""Reading of a GPU (`telemetry.metrics.GPU_METRICS`) -> figure."""
_OF_HOST = {
    "cpu_pct": _Figure("host_cpu_utilization_ratio", "CPU time of all processes against all cores.", 0.01),
    "iowait_pct": _Figure("host_iowait_ratio", "Share of CPU time idle while waiting for a disk.", 0.01),
    "mem_used_gib": _Figure("host_memory_used_bytes", "Memory in use.", GIB),
}
"""Reading of the host -> figure."""
_OF_STEP = {
    "wait_frac": _Figure("run_wait_ratio", "Share of a step spent waiting for its batch."),
    "copy_frac": _Figure("run_copy_ratio", "Share of a step in copies to the GPU that no computation hides."),
    "compute_frac": _Figure("run_compute_ratio", "Share of a step in forward, backward and optimizer."),
    "host_frac": _Figure("run_host_ratio", "Share of a step in the rest of the loop."),
    "step_ms_mean": _Figure("run_step_seconds", "Mean duration of a step.", 1e-3),
}
"""Key of ``time`` in run.json -> figure."""


@dataclass(frozen=True)
class SeenRun:
    """A run of this host that has not ended."""

    folder: Path
    evidence: Evidence

    @property
    def labels(self) -> tuple[str, str]:
        """Values of the labels ``run`` and ``workload``."""
        return show_line(self.folder.name), show_line(self.evidence.record.workload)


class RunFiles:
    """Runs below a log dir that go on now, read again and again in a thread while the ``with`` block lasts."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir, self._due_at_s = log_dir, 0.0
        self.found: Sequence[SeenRun] = ()
        """Latest reading; replaced as a whole."""
        self._ticker = Ticker("runs", RUNS_S, self._round, lambda: None)

    def __enter__(self) -> Self:
        self._ticker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ticker.stop()

    def _round(self) -> None:
        if time.monotonic() < self._due_at_s:
            return
        began_s = time.thread_time()
        self.found = tuple(running(self._log_dir))
        self._due_at_s = time.monotonic() + (time.thread_time() - began_s) / _MOST_FRAC


def running(log_dir: Path) -> Iterator[SeenRun]:
    """Yields the runs of this host that go on now, with their findings so far. One that can't be read is left out."""
    try:
        folders = RUN.all(log_dir)
    except ConfigError:  # the log dir can't be read now
        return
    for folder in folders:
        try:
            with (folder / RUN.marker).open("rb") as stream:
                if b'"status": "running"' not in stream.read(_HEAD_BYTES):
                    continue
            evidence = Evidence.read(folder)
            if evidence.record.status == "running" and evidence.record.host_name == socket.gethostname():
                conclude(evidence)
                yield SeenRun(folder, evidence)
        except (OSError, ValueError, ArithmeticError, TypeError, LookupError):  # being replaced, or damaged
            continue


class MonitorCollector:
    """Collector of prometheus_client over the latest readings of a monitor."""

    def __init__(self, board: Board, time_s: Callable[[], float], runs: RunFiles) -> None:
        """``time_s``: the clock of the board."""
        self._board, self._time_s, self._runs = board, time_s, runs

    def collect(self) -> Iterator[Metric]:
        """Yields all figures. A GPU without current figures has ``wellfed_gpu_up`` 0 alone."""
        yield _single("build_info", "1; the label has the version of wellfed.", 1, {"version": __version__})
        yield from self._of_gpus()
        yield from self._of_host()
        yield from _of_runs(self._runs.found)

    def _of_gpus(self) -> Iterator[Metric]:
        board, now_s = self._board, self._time_s()
        yield _single("gpu_count", "GPUs that are watched.", len(board.gpus))
        up, total, limit = (
            _family(_Figure(name, text), _GPU_LABELS)
            for name, text in (
                ("gpu_up", "1 = has current figures; 0 = lost, or the driver does not answer."),
                ("gpu_memory_total_bytes", "Device memory for programs."),
                ("gpu_power_limit_watts", "Power limit."),
            )
        )
        current: list[_Row] = []
        for gpu in board.gpus:
            labels, values = _labels_of(gpu), board.latest(gpu.index)
            is_up = bool(values) and board.trouble(gpu.index, now_s) is None
            up.add_metric(labels, float(is_up))
            if is_up:
                current.append((labels, values))
                for family, value in ((total, gpu.device.memory_total_bytes), (limit, gpu.device.power_limit_w)):
                    if value is not None:
                        family.add_metric(labels, float(value))
        yield from (family for family in (up, total, limit) if family.samples)
        yield from _families(_OF_GPU, _GPU_LABELS, current)

    def _of_host(self) -> Iterator[Metric]:
        board = self._board
        yield _single("host_cpu_cores", "Cores of the host.", board.num_cores)
        yield _single("host_memory_total_bytes", "Memory of the host.", board.ram_gib * GIB)
        if board.trouble(HOST, self._time_s()) is None:
            yield from _families(_OF_HOST, (), [((), board.latest(HOST))])


_Row = tuple[tuple[str, ...], Mapping[str, float | None]]
"""Values of labels, and readings by key."""
_GPU_LABELS = ("gpu", "uuid", "name")
_RUN_LABELS = ("run", "workload")


def _labels_of(gpu: SeenGpu) -> tuple[str, ...]:
    return str(gpu.index), gpu.device.uuid, show_line(gpu.device.name)


def _of_runs(runs: Sequence[SeenRun]) -> Iterator[Metric]:
    """Yields the figures of all runs that go on now."""
    yield _single("run_count", "Runs of this host that go on now.", len(runs))
    counts = {
        "steps": _Figure("run_steps", "Optimizer steps done.", is_counter=True),
        "samples": _Figure("run_samples", "Training samples done.", is_counter=True),
        "rate": _Figure("run_samples_per_second", "Rate of the latest steps, at most 10,000."),
        "ready": _Figure("run_ready_ratio", "Share of steps whose batch was ready when asked for."),
        "began": _Figure("run_start_time_seconds", "Unix time of the start."),
        "stepped": _Figure("run_last_step_time_seconds", "Unix time of the last row of steps.csv."),
    }
    rows, times = list[_Row](), list[_Row]()
    finding = _family(_Figure("finding", "1 = a finding about a run, as wellfed diagnose shows."), _FINDING_LABELS)
    for run in runs:
        record = run.evidence.record
        values = {"steps": record.steps, "samples": record.samples, "ready": record.readiness_frac}
        values |= {"rate": record.throughput["samples_per_s"] if record.throughput else None}
        values |= {"began": _unix_time(record.started_at), "stepped": _last_write(run.folder / "steps.csv")}
        rows.append((run.labels, values))
        of_step = (record.time or {}).items()
        times.append((run.labels, {key: value for key, value in of_step if isinstance(value, float)}))
        for one in dict.fromkeys((each["id"], each["severity"]) for each in record.findings):  # a sample is unique
            finding.add_metric((*run.labels, *one), 1.0)
    yield from _families(counts, _RUN_LABELS, rows)
    yield from _families(_OF_STEP, _RUN_LABELS, times)
    if finding.samples:
        yield finding


_FINDING_LABELS = (*_RUN_LABELS, "code", "severity")


def _families(
    figures: Mapping[str, _Figure],
    labels: Sequence[str],
    rows: Sequence[_Row],
) -> Iterator[Metric]:
    """Yields a family for each figure that any row of (label values, readings) has."""
    for key, figure in figures.items():
        family = _family(figure, labels)
        for label_values, values in rows:
            if (value := values.get(key)) is not None:
                family.add_metric(label_values, value * figure.factor)
        if family.samples:
            yield family


def _family(figure: _Figure, labels: Sequence[str]) -> CounterMetricFamily | GaugeMetricFamily:
    kind = CounterMetricFamily if figure.is_counter else GaugeMetricFamily
    return kind(f"wellfed_{figure.name}", figure.text, labels=labels)


def _single(name: str, text: str, value: float, labels: Mapping[str, str] | None = None) -> Metric:
    family = GaugeMetricFamily(f"wellfed_{name}", text, labels=[*(labels or {})])
    family.add_metric([*(labels or {}).values()], value)
    return family


def _unix_time(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def _last_write(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


class PrometheusServer:
    """HTTP server of the figures while the ``with`` block lasts; it shows nothing until `show`.

    Raises:
        ConfigError: it can't listen there.
    """

    def __init__(self, host: str, port: int, log_dir: Path) -> None:
        self._host, self._port, self._runs = host, port, RunFiles(log_dir)
        self._registry = CollectorRegistry()

    def __enter__(self) -> Self:
        try:
            self._server, self._thread = start_http_server(self._port, self._host, self._registry)
        except OSError as error:
            raise _refused(self._host, self._port, error) from error
        self._runs.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._runs.__exit__(*error)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def show(self, board: Board, time_s: Callable[[], float]) -> None:
        """Serves the figures of a board from now on; ``time_s`` is its clock."""
        self._registry.register(MonitorCollector(board, time_s, self._runs))

    @property
    def lines(self) -> list[str]:
        """Where it listens, for the user."""
        address = str(self._server.server_address[0])
        shown = f"[{self._host}]" if ":" in self._host else self._host
        lines = [f"Serving http://{shown}:{self._server.server_port}/metrics for Prometheus. Dashboard: {DASHBOARD}"]
        if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            lines.append("Other machines can read it, without a password.")
        return lines


def _refused(host: str, port: int, error: OSError) -> ConfigError:
    problem, way_out = f"can't be listened on: {error.strerror or error}.", "Name another: --serve 127.0.0.1:9400."
    if isinstance(error, socket.gaierror):
        problem = f"has no address: {error.strerror}."
    elif error.errno == errno.EADDRINUSE:
        problem, way_out = "is taken by another program.", "Name another port; 0 takes a free one."
    elif error.errno == errno.EACCES:
        problem = "is not permitted; ports below 1024 need special rights."
    elif error.errno == errno.EADDRNOTAVAIL:
        problem = "is no address of this machine."
    return ConfigError.of(f"--serve {host}:{port}", problem, way_out)
