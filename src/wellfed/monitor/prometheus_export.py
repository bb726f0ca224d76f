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
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Self

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from wellfed import __version__
from wellfed.config.files.folder_lookup import RUN
from wellfed.errors import ConfigError, first_line
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_rules import conclude
from wellfed.monitor.board import Board
from wellfed.monitor.seen_gpus import SeenGpu
from wellfed.observe.telemetry.machines import HOST
from wellfed.observe.telemetry.ticker import Ticker
from wellfed.record import RunRecord
from wellfed.units import GIB, show_line

DASHBOARD = Path(__file__).with_name("grafana_dashboard.json")
RUNS_S = 10.0
"""Least seconds between two readings of the runs' files."""
_MOST_FRAC = 0.02
"""Largest share of the time that reading them may take; long runs are read less often."""
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


class RunFiles:
    """Runs below a log dir that go on now, read again and again in a thread while the ``with`` block lasts."""

    def __init__(self, log_dir: Path, tell: Callable[[str], None]) -> None:
        """``tell``: gets a line for the user when the runs can't be read."""
        self._log_dir, self._tell, self._told, self._due_at_s = log_dir, tell, "", 0.0
        self.found: Mapping[Path, RunRecord] | None = None
        """Folder -> record, of the latest reading; replaced as a whole. None if it failed, or there was none yet."""
        self.read_at_s: float | None = None
        """Unix time of the latest reading that did not fail."""
        self._ticker = Ticker("runs", RUNS_S, self._round, lambda: None)

    def __enter__(self) -> Self:
        self._ticker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ticker.stop()

    def _round(self) -> None:
        if time.monotonic() < self._due_at_s:
            return
        began_s, problem = time.monotonic(), ""
        try:
            self.found = dict(running(self._log_dir))
            self.read_at_s = time.time()
            if not self._log_dir.is_dir():
                problem = f"There is no folder {self._log_dir}: its runs are shown once it exists. Another: --log-dir."
        except Exception as error:  # noqa: BLE001  the thread must go on
            why = str(error.faults[0]) if isinstance(error, ConfigError) else first_line(error)
            self.found, problem = None, f"No runs are shown: {why}"
        if problem not in ("", self._told):
            self._tell(problem)
        self._told = problem
        self._due_at_s = time.monotonic() + (time.monotonic() - began_s) / _MOST_FRAC


def running(log_dir: Path) -> Iterator[tuple[Path, RunRecord]]:
    """Yields the runs of this host that go on now, with their findings so far. One that can't be read is left out.

    Raises:
        ConfigError: the log dir can't be read.
    """
    for folder in RUN.all(log_dir):
        with suppress(Exception):  # being replaced, or damaged
            with (folder / RUN.marker).open("rb") as stream:
                if b'"status": "running"' not in stream.read(_HEAD_BYTES):
                    continue
            evidence = Evidence.read(folder)
            if evidence.record.status == "running" and evidence.record.host_name == socket.gethostname():
                conclude(evidence)
                yield folder, evidence.record


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
        yield from _of_runs(self._runs)

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


def _of_runs(runs: RunFiles) -> Iterator[Metric]:
    """Yields the figures of all runs that go on now; none if their files can't be read."""
    if runs.read_at_s is not None:
        yield _single("runs_read_time_seconds", "Unix time of the latest reading of the runs.", runs.read_at_s)
    found = runs.found  # replaced by the thread that reads
    if found is None:
        return
    yield _single("run_count", "Runs of this host that go on now.", len(found))
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
    for folder, record in found.items():
        labels = (show_line(folder.name), show_line(record.workload))
        values = {"steps": record.steps, "samples": record.samples, "ready": record.readiness_frac}
        values |= {"rate": record.throughput["samples_per_s"] if record.throughput else None}
        values |= {"began": _unix_time(record.started_at), "stepped": _last_write(folder / "steps.csv")}
        rows.append((labels, values))
        of_step = (record.time or {}).items()
        times.append((labels, {key: value for key, value in of_step if isinstance(value, float)}))
        for one in dict.fromkeys((each["id"], each["severity"]) for each in record.findings):  # a sample is unique
            finding.add_metric((*labels, *one), 1.0)
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
        self._host, self._port, self._log_dir = host, port, log_dir
        self._registry, self._reading = CollectorRegistry(), ExitStack()

    def __enter__(self) -> Self:
        try:
            self._server, self._thread = start_http_server(self._port, self._host, self._registry)
        except (OSError, UnicodeError) as error:
            raise _refused(self._host, self._port, error) from error
        return self

    def __exit__(self, *error: object) -> None:
        self._reading.close()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def show(self, board: Board, time_s: Callable[[], float], tell: Callable[[str], None]) -> None:
        """Serves the figures of a board from now on.

        Args:
            time_s: clock of the board.
            tell: gets lines for the user, from another thread.
        """
        runs = self._reading.enter_context(RunFiles(self._log_dir, tell))
        self._registry.register(MonitorCollector(board, time_s, runs))

    @property
    def lines(self) -> list[str]:
        """Where it listens, for the user."""
        address = str(self._server.server_address[0])
        shown = f"[{self._host}]" if ":" in self._host else self._host
        lines = [f"Serving http://{shown}:{self._server.server_port}/metrics for Prometheus. Dashboard: {DASHBOARD}"]
        if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            lines.append("Other machines can read it, without a password.")
        return lines


def _refused(host: str, port: int, error: OSError | UnicodeError) -> ConfigError:
    problem, way_out = (
        f"can't be listened on: {getattr(error, 'strerror', None) or error}.",
        "Name another: --serve 127.0.0.1:9400.",
    )
    if isinstance(error, UnicodeError):
        problem = "is no name of a host."
    elif isinstance(error, socket.gaierror):
        problem = f"has no address: {error.strerror}."
    elif error.errno == errno.EADDRINUSE:
        problem, way_out = "is taken by another program.", "Name another port; 0 takes a free one."
    elif error.errno == errno.EACCES:
        problem = "is not permitted; ports below 1024 need special rights."
    elif error.errno == errno.EADDRNOTAVAIL:
        problem = "is no address of this machine."
    return ConfigError.of(f"--serve {host}:{port}", problem, way_out)
