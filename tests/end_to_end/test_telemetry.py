"""Runs that are watched, through the real pynvml and a driver library that plays a scenario."""

import json
import signal
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.commands import FAST, only_folder, record_of, start, train
from tests.fake_nvml.driver import (
    FakeDriver,
    FakeGpu,
    Scenario,
    Wave,
    read_report,
)
from tests.kit.tables import rows_of
from tests.kit.wandb_files import stored

H200 = FakeGpu("GPU-h200", "NVIDIA H200", 141.0, 20.0, 0.5, util=Wave(1.0, low=9, high=90), power_w=400.0, gpm=True)
RTX = FakeGpu("GPU-rtx", "NVIDIA GeForce RTX 4090", 24.0, 3.0, 0.3, capability=(8, 9), util=50.0, power_w=200.0)


def driver(fake_driver: FakeDriver, scenario: Scenario, report: Path | None = None, **more: str) -> dict[str, str]:
    """Variables with which a command finds the driver."""
    kept = ("LD_LIBRARY_PATH", "FAKE_NVML_SCENARIO", "FAKE_NVML_REPORT")
    found = fake_driver.environment(scenario, report=report)
    return {name: found[name] for name in kept if name in found} | more


def rows(folder: Path, gpu: int, having: str = "") -> list[dict[str, str]]:
    """Rows of telemetry.csv of one GPU, -1 = of the host, that have this figure."""
    found = rows_of(folder / "telemetry.csv")
    return [row for row in found if int(row["gpu"]) == gpu and (not having or row[having])]


def events(record: Any, kind: str) -> list[Any]:
    return [event for event in record["events"] if event["kind"] == kind]


@pytest.mark.slow
def test_two_different_gpus_are_watched_under_cudas_numbers(tmp_path: Path, fake_driver: FakeDriver) -> None:
    variables = driver(
        fake_driver,
        Scenario([H200, RTX]),
        tmp_path / "calls",
        CUDA_VISIBLE_DEVICES="GPU-rtx,GPU-h200",
    )
    arguments = ("telemetry=dense", "telemetry.ceiling_steps=60", "trainer.max_steps=120")
    done = train(*arguments, cwd=tmp_path, fresh=True, **variables)
    assert done.code == 0, done.text
    folder = only_folder(tmp_path)
    record = record_of(folder)
    assert [(gpu["index"], gpu["name"]) for gpu in record["machine"]["gpus"]] == [(0, RTX.name), (1, H200.name)]

    rtx, h200, host = rows(folder, 0, "util_pct"), rows(folder, 1, "util_pct"), rows(folder, -1)
    assert min(len(rtx), len(h200), len(host)) > 10
    assert {float(row["mem_used_gib"]) for row in rtx} == {3.0}
    assert {float(row["mem_used_gib"]) for row in h200} == {20.0}
    assert {row["sm_active_pct"] for row in rtx} == {""}
    assert any(row["sm_active_pct"] for row in h200)
    assert {"start", "train", "ceiling"} <= {row["phase"] for row in [*rtx, *host]}
    assert min(float(row["util_pct"]) for row in h200) < 20
    assert max(float(row["util_pct"]) for row in h200) > 80
    for of_one in (rtx, h200, host):
        assert all(float(a["time_s"]) < float(b["time_s"]) for a, b in pairwise(of_one))
        assert all(int(a["step"]) <= int(b["step"]) for a, b in pairwise(of_one))
    assert all(float(a["time_s"]) <= float(b["time_s"]) for a, b in pairwise(rows_of(folder / "telemetry.csv")))
    assert all(float(row["rss_gib"]) > 0.1 for row in host)
    assert max(float(row["cpu_pct"]) for row in host if row["cpu_pct"]) > 10

    gpus = record["gpus"]
    assert set(gpus) == {"0", "1"}
    assert set(gpus["1"]["util_pct"]) == {"mean", "p5", "p50", "p95", "max", "n"}
    assert gpus["0"]["util_pct"]["mean"] == 50
    assert 9 <= gpus["1"]["util_pct"]["p5"] < gpus["1"]["util_pct"]["p95"] <= 90
    assert gpus["0"]["power_w"]["mean"] == pytest.approx(200, rel=0.05)
    trained_s = gpus["0"]["energy_j"] / 200
    assert 0 < trained_s < record["duration_s"]
    assert gpus["1"]["energy_j"] == pytest.approx(400 * trained_s, rel=0.1)
    assert gpus["1"]["energy_per_sample_j"] == pytest.approx(gpus["1"]["energy_j"] / record["samples"], rel=0.06)
    report = (folder / "report.md").read_text()
    assert "CPU: " in report
    assert ": utilisation" not in report  # others may use the cards while this run trains on the CPU
    assert events(record, "telemetry_trouble") == []
    (absent,) = events(record, "metric_absent")
    assert absent["gpu"] == 0
    assert "sm_active_pct" in absent["metrics"]
    assert 0 < record["telemetry"]["cpu_frac"] < 0.5

    run = stored(tmp_path / record["wandb"]["path"])
    assert run.exit_code == 0
    summary = {name: value for entry in run.of_type("summary") for name, value in entry["update"].items()}
    for gpu, figures in gpus.items():
        for name in ("mean", "p5", "p95"):
            assert summary[f"gpu{gpu}/util_{name}_pct"] == pytest.approx(figures["util_pct"][name])
    assert any("findings.path" in row for row in run.history)
    assert run.axes["gpu*"] == run.axes["host/*"] == "telemetry/time_s"
    for name, of_one in (("gpu0/util_pct", rtx), ("gpu1/util_pct", h200), ("host/rss_gib", host)):
        curve = run.curve("telemetry/time_s", name)
        assert [value for _, value in curve] == pytest.approx([float(row[name.split("/")[1]]) for row in of_one], 1e-4)
    for report in read_report(tmp_path / "calls"):  # every process gave back what it took
        assert (report["users"], report["gpm_samples"]) == (0, 0)


@pytest.mark.slow
def test_a_killed_run_keeps_its_curves_and_goes_on(tmp_path: Path, fake_driver: FakeDriver) -> None:
    variables = driver(fake_driver, Scenario([H200]))
    command = ["telemetry.interval_s=0.1", "trainer.checkpoint_every_steps=5", "hydra.run.dir=run"]
    process = start("train.py", *FAST, *command, "trainer.max_steps=5000", cwd=tmp_path, **variables)
    folder = tmp_path / "run"
    ends_at_s = time.monotonic() + 120
    while time.monotonic() < ends_at_s and process.poll() is None:
        if (folder / "checkpoints" / "last.ckpt").exists() and sum(
            row["phase"] == "train" for row in rows(folder, 0)
        ) > 20:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    table = rows(folder, 0, "mem_used_gib")
    part = tmp_path / json.loads((folder / "run.json").read_text())["wandb"]["path"]
    curve = stored(part).curve("telemetry/time_s", "gpu0/mem_used_gib")
    assert len(table) > 20
    assert len(table) - 1 <= len(curve) <= len(table) + 1

    reached = int(table[-1]["step"])
    done = train(f"resume={folder}", f"trainer.max_steps={reached + 30}", cwd=tmp_path, **variables)
    assert done.code == 0, done.text
    record, went_on = record_of(folder), rows(folder, 0)
    resumed_at = next(event["step"] for event in record["events"] if event["kind"] == "resume")
    assert all(int(a["step"]) <= int(b["step"]) for a, b in pairwise(went_on))
    assert all(float(a["time_s"]) < float(b["time_s"]) for a, b in pairwise(went_on))
    assert int(went_on[0]["step"]) < resumed_at < int(went_on[-1]["step"])
    assert record["gpus"]["0"]["util_pct"]["n"] < len(went_on)
