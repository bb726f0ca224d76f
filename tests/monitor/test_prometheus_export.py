"""What Prometheus gets from ``wellfed monitor --serve``: real scrapes, parsed by prometheus_client's own parser."""

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.end_to_end.commands import ROOT
from tests.fake_nvml.driver import FakeDriver, FakeGpu, FakeMig, Lost, Scenario
from tests.kit.watched import h200, until
from tests.test_record import dead_pid
from wellfed import __version__
from wellfed.cli import main as cli
from wellfed.errors import ConfigError
from wellfed.monitor import prometheus_export
from wellfed.monitor.monitor import Monitor
from wellfed.monitor.prometheus_export import DASHBOARD, PrometheusServer, RunFiles
from wellfed.monitor.seen_gpus import FoundGpus, find_gpus
from wellfed.observe.telemetry.machines import HOST
from wellfed.observe.telemetry.metrics import GPU_METRICS
from wellfed.record import RunRecord

Found = dict[str, dict[tuple[tuple[str, str], ...], float]]
"""Name of a sample -> labels -> value."""


def scraped(url: str) -> Found:
    """All samples of a page; each name is of one family, and no sample stands twice."""
    with urllib.request.urlopen(url, timeout=20) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        text = answer.read().decode()
    found: Found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            assert labels not in found.setdefault(sample.name, {})
            found[sample.name][labels] = sample.value
    return found


def of_gpu(found: Found, name: str) -> dict[str, float]:
    """Values of a figure by the number of the GPU."""
    return {dict(labels)["gpu"]: value for labels, value in found.get(name, {}).items()}


def runs_of(found: Found) -> float | None:
    """How many runs go on; None before their files were read."""
    return found.get("wellfed_run_count", {}).get(())


@contextmanager
def served(monitor: Monitor, log_dir: Path) -> Iterator[Callable[[], Found]]:
    """A function that scrapes a monitor's server, while the monitor watches."""
    with PrometheusServer("127.0.0.1", 0, log_dir) as server, monitor:
        server.show(monitor.board, monitor.time_s, monitor.add_line)
        (line,) = server.lines
        (url,) = re.findall(r"http://127\.0\.0\.1:\d+/metrics", line)
        yield lambda: scraped(url)


def go_on(log_dir: Path, name: str = "2026-01-01_00-00-00_aaaa", steps: int = 60, **facts: Any) -> Path:
    """A run of this process that has not ended; its steps wait 30 ms and compute 10 ms."""
    folder = log_dir / "recsys" / "runs" / name
    folder.mkdir(parents=True)
    record = RunRecord.start(name)
    record.workload, record.machine = "recsys", {"cpu_quota_cores": 8.0}
    record.plan = {"loader.num_workers": {"value": 1, "because": "", "source": "set"}}
    for key, value in facts.items():
        setattr(record, key, value)
    record.write(folder)
    rows = [f"{step},{0.04 * step},0,128,30,10,0,0" for step in range(1, steps + 1)]
    head = "step,time_s,epoch,samples,wait_ms,compute_ms,host_ms,ready"
    (folder / "steps.csv").write_text("\n".join([head, *rows, ""]))
    return folder


def test_gpus_and_host_are_in_base_units(fake_driver: FakeDriver, tmp_path: Path) -> None:
    scenario = Scenario([h200("GPU-1", power_limit_w=700), FakeGpu("GPU-2", 'odd "name"\\', util=90)])
    with fake_driver.load(scenario), served(monitor := Monitor(find_gpus(), interval_s=0.1), tmp_path) as scrape:
        until(lambda: all(monitor.board.curve(gpu)[0].size >= 2 for gpu in (0, 1, HOST)))
        until(lambda: runs_of(scrape()) is not None)
        found = scrape()
        host = monitor.board.latest(HOST)
    one = (("gpu", "0"), ("name", "NVIDIA H200"), ("uuid", "GPU-1"))
    other = (("gpu", "1"), ("name", 'odd "name"\\'), ("uuid", "GPU-2"))
    assert found["wellfed_build_info"] == {(("version", __version__),): 1}
    assert found["wellfed_gpu_count"] == {(): 2}
    assert found["wellfed_gpu_up"] == {one: 1, other: 1}
    assert found["wellfed_gpu_utilization_ratio"] == {one: pytest.approx(0.6), other: pytest.approx(0.9)}
    assert found["wellfed_gpu_sm_active_ratio"] == {one: pytest.approx(0.6)}  # the other has no GPM
    assert found["wellfed_gpu_memory_used_bytes"][one] == 5 * 2**30
    assert found["wellfed_gpu_memory_total_bytes"][one] == 140.5 * 2**30
    assert found["wellfed_gpu_power_watts"][one] == pytest.approx(350.5)
    assert found["wellfed_gpu_power_limit_watts"] == {one: 700}
    assert found["wellfed_gpu_temperature_celsius"][one] == 55
    assert found["wellfed_gpu_sm_clock_hertz"][one] == 1.98e9
    assert found["wellfed_gpu_memory_clock_hertz"][one] == 3.201e9
    assert found["wellfed_gpu_pcie_received_bytes_per_second"][one] == pytest.approx(2000 * 2**20, rel=0.05)
    assert found["wellfed_gpu_power_limited"][one] == 1
    assert found["wellfed_gpu_energy_joules_total"][one] >= 0
    assert found["wellfed_host_memory_used_bytes"][()] == pytest.approx(host["mem_used_gib"] * 2**30, rel=0.2)
    assert found["wellfed_host_memory_total_bytes"] == {(): psutil.virtual_memory().total}
    assert 0 <= found["wellfed_host_cpu_utilization_ratio"][()] <= 1
    assert found["wellfed_host_cpu_cores"] == {(): psutil.cpu_count()}
    assert found["wellfed_run_count"] == {(): 0}
    assert all(name.startswith("wellfed_") for name in found)
    assert [name for name in found if re.search(r"_(pct|gib|mb|mhz|ms|frac|w|c|j)(_|$)", name)] == []


def test_every_figure_of_a_gpu_has_a_name_of_its_own() -> None:
    figures = prometheus_export._OF_GPU
    assert list(figures) == [metric.name for metric in GPU_METRICS]
    assert len({figure.name for figure in figures.values()}) == len(figures)


def test_a_lost_gpu_is_down_and_has_no_other_figure(fake_driver: FakeDriver, tmp_path: Path) -> None:
    scenario = Scenario([h200("GPU-1", lost=Lost(from_s=50)), h200("GPU-2")])
    with (
        fake_driver.load(scenario) as driver,
        served(monitor := Monitor(find_gpus(), interval_s=0.1), tmp_path) as scrape,
    ):
        until(lambda: monitor.board.latest(0) and monitor.board.latest(1))
        assert of_gpu(scrape(), "wellfed_gpu_up") == {"0": 1, "1": 1}
        driver.advance(60)
        until(lambda: monitor.board.trouble(0, monitor.time_s()))
        until(lambda: monitor.board.latest(1))
        found = scrape()
    assert of_gpu(found, "wellfed_gpu_up") == {"0": 0, "1": 1}
    per_gpu = {name: of_gpu(found, name) for name, values in found.items() if any("gpu" in dict(one) for one in values)}
    assert len(per_gpu) > 10
    assert [name for name, values in per_gpu.items() if "0" in values] == ["wellfed_gpu_up"]


def test_a_gpu_that_is_not_read_any_more_is_down(fake_driver: FakeDriver, tmp_path: Path) -> None:
    with fake_driver.load(Scenario([h200("GPU-1")])):
        monitor = Monitor(find_gpus(), interval_s=0.1)
        with monitor:
            until(lambda: monitor.board.latest(0) and monitor.board.latest(HOST))
    with PrometheusServer("127.0.0.1", 0, tmp_path) as server:
        server.show(monitor.board, lambda: monitor.time_s() + 60, print)
        found = scraped(re.findall(r"http\S+", server.lines[0])[0])
    assert of_gpu(found, "wellfed_gpu_up") == {"0": 0}
    assert "wellfed_gpu_utilization_ratio" not in found
    assert "wellfed_host_cpu_utilization_ratio" not in found


def test_an_instance_has_what_it_offers(fake_driver: FakeDriver, tmp_path: Path) -> None:
    card = FakeGpu("GPU-1", gpm=True, util=70, mig=[FakeMig("MIG-1", util=40, used_gib=3)])
    with (
        fake_driver.load(Scenario([card])),
        served(monitor := Monitor(find_gpus(), interval_s=0.1), tmp_path) as scrape,
    ):
        until(lambda: monitor.board.curve(1)[0].size)
        found = scrape()
    assert of_gpu(found, "wellfed_gpu_sm_active_ratio")["1"] == pytest.approx(0.4)
    assert "1" not in of_gpu(found, "wellfed_gpu_utilization_ratio")


def test_runs_that_go_on_are_shown_with_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus_export, "RUNS_S", 0.05)
    folder = go_on(tmp_path)
    go_on(tmp_path, "2026-01-01_00-00-01_bbbb", status="ok")
    go_on(tmp_path, "2026-01-01_00-00-02_cccc", host_name="another")
    go_on(tmp_path, "2026-01-01_00-00-03_dddd", pid=dead_pid())
    (go_on(tmp_path, "2026-01-01_00-00-04_eeee") / "run.json").write_text('{"status": "running", ')
    labels = (("run", folder.name), ("workload", "recsys"))
    with served(Monitor(FoundGpus((), "library not found"), interval_s=0.1), tmp_path) as scrape:
        until(lambda: runs_of(scrape()) == 1)
        found = scrape()
        record = RunRecord.read(folder)
        record.status = "ok"
        record.write(folder)
        until(lambda: runs_of(scrape()) == 0)
        later = scrape()
    assert found["wellfed_gpu_count"] == {(): 0}
    assert found["wellfed_run_samples_per_second"] == {labels: pytest.approx(3200)}
    assert found["wellfed_run_wait_ratio"] == {labels: pytest.approx(0.75)}
    assert found["wellfed_run_step_seconds"] == {labels: pytest.approx(0.04)}
    assert found["wellfed_run_steps_total"] == {labels: 60}
    assert found["wellfed_run_samples_total"] == {labels: 60 * 128}
    assert found["wellfed_run_ready_ratio"] == {labels: 0}
    assert found["wellfed_run_last_step_time_seconds"] == {
        labels: pytest.approx((folder / "steps.csv").stat().st_mtime)
    }
    assert (*sorted((*labels, ("code", "too_few_workers"), ("severity", "high"))),) in found["wellfed_finding"]
    of_runs = [name for name in later if name.startswith(("wellfed_run_", "wellfed_finding"))]
    assert of_runs == ["wellfed_run_count"]
    assert later["wellfed_runs_read_time_seconds"][()] > found["wellfed_runs_read_time_seconds"][()]


def test_runs_are_shown_again_after_a_reading_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus_export, "RUNS_S", 0.05)
    go_on(tmp_path)
    broken = go_on(tmp_path, "2026-01-01_00-00-01_bbbb")
    is_refused, listdir, conclude = threading.Event(), os.listdir, prometheus_export.conclude

    def refusing(path: Any = ".") -> list[str]:
        if path == tmp_path and is_refused.is_set():
            raise PermissionError(errno.EACCES, "Permission denied")
        return listdir(path)

    def failing(evidence: Any) -> None:
        assert evidence.record.run_id != broken.name
        conclude(evidence)

    monkeypatch.setattr(os, "listdir", refusing)
    monkeypatch.setattr(prometheus_export, "conclude", failing)
    with served(monitor := Monitor(FoundGpus((), "x"), interval_s=0.1), tmp_path) as scrape:
        until(lambda: runs_of(scrape()) == 1)
        is_refused.set()
        until(lambda: runs_of(scrape()) is None)
        assert "wellfed_runs_read_time_seconds" in scrape()
        is_refused.clear()
        until(lambda: runs_of(scrape()) == 1)
        lines = monitor.new_lines()
    told = f"No runs are shown: {tmp_path}: can't be looked into: Permission denied. Name another: --log-dir."
    assert [line for line in lines if "runs" in line] == [told]


def test_a_reading_that_fails_during_a_scrape_takes_nothing_from_it(tmp_path: Path) -> None:
    go_on(tmp_path)
    with RunFiles(tmp_path, print) as runs:
        until(lambda: runs.found)
    families = prometheus_export._of_runs(runs)
    names = [next(families).name for _ in range(2)]
    runs.found = None
    names += [family.name for family in families]
    assert names[:3] == ["wellfed_runs_read_time_seconds", "wellfed_run_count", "wellfed_run_steps"]


def test_a_log_dir_that_is_not_there_is_told(tmp_path: Path) -> None:
    with served(monitor := Monitor(FoundGpus((), "x"), interval_s=0.1), tmp_path / "logz") as scrape:
        until(lambda: runs_of(scrape()) == 0)
        lines = list[str]()
        until(lambda: lines.extend(monitor.new_lines()) or lines)
    assert f"There is no folder {tmp_path}/logz: its runs are shown once it exists. Another: --log-dir." in lines


def test_a_run_without_a_step_has_no_rate(tmp_path: Path) -> None:
    (go_on(tmp_path) / "steps.csv").unlink()
    with served(monitor := Monitor(FoundGpus((), "x"), interval_s=0.1), tmp_path) as scrape:
        until(lambda: runs_of(scrape()) == 1)
        found = scrape()
    assert monitor.board.gpus == ()
    assert "wellfed_run_samples_per_second" not in found
    assert list(found["wellfed_run_steps_total"].values()) == [0]


def test_the_dashboard_shows_what_is_served(fake_driver: FakeDriver, tmp_path: Path) -> None:
    go_on(tmp_path)
    with (
        fake_driver.load(Scenario([h200("GPU-1", power_limit_w=700)])),
        served(monitor := Monitor(find_gpus(), interval_s=0.1), tmp_path) as scrape,
    ):
        until(lambda: all(monitor.board.curve(gpu)[0].size >= 2 for gpu in (0, HOST)))
        until(lambda: runs_of(scrape()) == 1)
        found = scrape()
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    assert {"uid", "title", "schemaVersion", "panels", "time"} <= dashboard.keys()
    assert "id" not in dashboard  # of another Grafana: provisioning refuses it
    targets = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    shown = set(re.findall(r"wellfed_\w+", " ".join(targets)))
    assert len(targets) == len([one for one in targets if 'instance=~"$instance"' in one]) > 10
    assert shown - found.keys() == set()
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    page = (ROOT / "docs" / "prometheus.md").read_text(encoding="utf-8")
    described = set(re.findall(r"`(wellfed_\w+)`", page))
    absent_here = {"wellfed_host_iowait_ratio", "wellfed_run_copy_ratio"}  # not Linux; no GPU
    assert described - absent_here == found.keys() - absent_here


def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as refused, PrometheusServer("127.0.0.1", port, tmp_path):
            pytest.fail("it listens")
    assert f"--serve 127.0.0.1:{port}: is taken by another program. Name another port; 0" in str(refused.value)


@pytest.mark.parametrize(
    ("host", "told"),
    [
        ("no-such-host.invalid", "--serve no-such-host.invalid:0: has no address: "),
        ("a..b", "--serve a..b:0: is no name of a host. Name another: --serve 127.0.0.1:9400."),
        ("192.0.2.7", "--serve 192.0.2.7:0: is no address of this machine. Name another: --serve 127.0.0.1:9400."),
    ],
)
def test_a_host_that_is_not_this_one_is_told(tmp_path: Path, host: str, told: str) -> None:
    with pytest.raises(ConfigError) as refused, PrometheusServer(host, 0, tmp_path):
        pytest.fail("it listens")
    assert told in str(refused.value)


def test_a_port_of_the_system_is_told() -> None:
    """Root may listen there, so the error is made."""
    refused = prometheus_export._refused("127.0.0.1", 80, OSError(errno.EACCES, "Permission denied"))
    assert "--serve 127.0.0.1:80: is not permitted; ports below 1024 need special rights." in str(refused)
    other = prometheus_export._refused("127.0.0.1", 80, OSError(errno.EMFILE, "Too many open files"))
    assert "can't be listened on: Too many open files." in str(other)


def test_who_can_read_it_from_elsewhere_is_told(tmp_path: Path) -> None:
    with PrometheusServer("0.0.0.0", 0, tmp_path) as server:
        assert server.lines[1:] == ["Other machines can read it, without a password."]
    with PrometheusServer("127.0.0.1", 0, tmp_path) as server:
        assert len(server.lines) == 1


@pytest.mark.parametrize(
    "text", ["", "port", "70000", ":9400", "127.0.0.1:", "::1", "::1:9400", "[]:9400", "[::1:9400", "1.2.3.4:x", "-1"]
)
def test_what_is_no_port_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["monitor", f"--serve={text}"])
    assert ended.value.code == 2
    assert f"--serve: {text}: must be a port, or a host and a port: 9400, 127.0.0.1:9400" in capsys.readouterr().err


def test_without_the_package_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert cli.main(["monitor", "--serve", "9400"]) == 2
    told = capsys.readouterr().err
    assert "--serve: needs the package prometheus_client (figures for Prometheus), which is not installed." in told
    assert "Install it: python -m pip install 'wellfed[serve]'." in told


def test_a_service_listens_on_this_machine_alone_and_prints_events_only(
    fake_driver: FakeDriver, tmp_path: Path
) -> None:
    environ = {**fake_driver.environment(Scenario([h200("GPU-1")])), "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "wellfed", "monitor", "--serve", "0", "--interval", "0.1"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            first = [process.stdout.readline() for _ in range(3)]
            (url,) = re.findall(r"http://\S+/metrics", first[1])
            until(lambda: of_gpu(scraped(url), "wellfed_gpu_up") == {"0": 1})
            listening = [one.laddr for one in psutil.Process(process.pid).net_connections() if one.status == "LISTEN"]
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert first[0] == "Watching 1 GPU and the host until Ctrl-C.\n"
    assert os.fspath(DASHBOARD) in first[1]
    assert [address.ip for address in listening] == ["127.0.0.1"]
    assert (process.returncode, err) == (143, "")
    assert not re.search(r"^\d\d:\d\d:\d\d ", out, re.MULTILINE)
    assert "GPU 0 NVIDIA H200: utilisation 60 % on average" in out
    with pytest.raises(OSError, match="refused"):
        scraped(url)
