"""Whole commands on a simulated machine, whose NVML shows through the real pynvml what its cards do."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.commands import only_folder, record_of, run, train
from tests.fake_cuda.machine import Cards, FakeCuda, machine_environment
from tests.fake_nvml.driver import FakeDriver
from tests.kit.tables import rows_of
from tests.kit.wandb_files import stored

pytestmark = pytest.mark.slow


@pytest.fixture
def machine(fake_cuda: FakeCuda, fake_driver: FakeDriver, tmp_path: Path) -> dict[str, str]:
    return machine_environment(fake_driver, tmp_path, Cards(mib=24 * 1024, context_mib=500, slowdown=2))


def check_curves(cwd: Path, record: Mapping[str, Any]) -> None:
    """What was seen of the card is possible, the same in the table and in wandb, and agrees with the steps."""
    folder = only_folder(cwd)
    rows = [row for row in rows_of(folder / "telemetry.csv") if row["gpu"] == "0"]
    assert {"train", "ceiling"} <= {row["phase"] for row in rows}
    stored_run = stored(cwd / record["wandb"]["path"])
    for name, low, high in (
        ("util_pct", 0, 100),
        ("sm_active_pct", 0, 100),
        ("mem_used_gib", 500 / 1024, 24),
        ("power_w", 60, 350),
        ("sm_clock_mhz", 300, 1500),
    ):
        seen = [(float(row["time_s"]), float(row[name])) for row in rows if row[name]]
        assert seen, name
        assert all(low <= value <= high for _, value in seen[1:]), (name, seen)
        curve = stored_run.curve("telemetry/time_s", f"gpu0/{name}")
        assert [at_s for at_s, _ in curve] == pytest.approx([at_s for at_s, _ in seen], abs=1e-3)
        assert [value for _, value in curve] == pytest.approx([value for _, value in seen], abs=1e-2)
    trained = [float(row["util_pct"]) for row in rows if row["util_pct"] and row["phase"] == "train"]
    steps = rows_of(folder / "steps.csv")[3:]
    busy_ms, waited_ms = (sum(float(row[name]) for row in steps) for name in ("compute_ms", "wait_ms"))
    assert sum(trained) / len(trained) == pytest.approx(100 * busy_ms / (busy_ms + waited_ms), abs=25)


def test_a_starved_card_is_idle_and_a_fed_one_is_busy(tmp_path: Path, machine: dict[str, str]) -> None:
    utilisation = {}
    for loader in ("baseline", "aggressive"):
        folder = tmp_path / loader
        folder.mkdir()
        words = (f"loader={loader}", "trainer.max_steps=80", "telemetry=dense")
        done = run("train.py", *words, cwd=folder, fresh=True, **machine)
        assert done.code == 0, done.text
        record = record_of(only_folder(folder))
        assert record["machine"]["gpus"][0]["is_simulated"]
        assert "Simulated GPU 24 GiB" in done.out
        utilisation[loader] = record["gpus"]["0"]["util_pct"]["mean"]
        check_curves(folder, record)
    assert utilisation["baseline"] < 50, utilisation
    assert utilisation["aggressive"] > 70, utilisation


def test_a_launch_bound_card_is_idle_though_nothing_waits(
    tmp_path: Path, fake_cuda: FakeCuda, fake_driver: FakeDriver
) -> None:
    """Small kernels, each of which takes the host longer to launch than the card to do."""
    machine = machine_environment(fake_driver, tmp_path, Cards(mib=24 * 1024, launch_us=500))
    words = ("loader=aggressive", "trainer.max_steps=60", "telemetry=dense", "telemetry.ceiling_steps=20")
    done = train(*words, "logger=none", cwd=tmp_path, fresh=True, **machine)
    assert done.code == 0, done.text
    record = record_of(only_folder(tmp_path))
    assert record["gpus"]["0"]["util_pct"]["mean"] < 50
    assert record["time"]["wait_frac"] < 0.1
    assert record["time"]["compute_frac"] > 0.8
    time = record["time"]
    phases = [time[f"{name}_frac"] for name in ("forward", "backward", "optimizer")]
    assert all(share > 0 for share in phases)
    assert 0.7 * time["compute_frac"] < sum(phases) <= 1.001 * time["compute_frac"]
    for name in ("forward", "backward"):  # the card waits for each launch
        assert 0.5 < time[f"device_{name}_ms"] / time[f"{name}_ms"] < 2
    assert 0.4 < record["ceiling"]["samples_per_s"] / record["throughput"]["samples_per_s"] < 2.5  # of a shared host
