"""The monitor in one process sees a training in another, on a simulated machine."""

import csv
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.commands import ROOT, environment, only_folder, record_of, start
from tests.fake_cuda.machine import Cards, FakeCuda, machine_environment
from tests.fake_nvml.driver import FakeDriver

pytestmark = pytest.mark.slow


def wellfed(*words: str, cwd: Path, **variables: str) -> subprocess.Popen[str]:
    paths = os.pathsep.join(filter(None, [str(ROOT / "src"), variables.pop("PYTHONPATH", "")]))
    return subprocess.Popen(
        [sys.executable, "-m", "wellfed", *words],
        cwd=cwd,
        env=environment(PYTHONPATH=paths, **variables),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_a_training_that_begins_later_is_named_watched_and_judged(
    tmp_path: Path, fake_cuda: FakeCuda, fake_driver: FakeDriver
) -> None:
    machine = machine_environment(fake_driver, tmp_path, Cards(cards=2, mib=24 * 1024, context_mib=500, slowdown=2))
    path = tmp_path / "curves.csv"
    watching = wellfed("monitor", "--seconds", "0", "--csv", str(path), cwd=tmp_path, **machine)
    try:
        # Starved: the training process builds each batch itself, and long enough for two slow rounds of readings.
        words = ("loader=baseline", "trainer.max_time_s=8", "trainer.max_epochs=1000", "telemetry=none", "logger=none")
        training = start("train.py", *words, cwd=tmp_path, **machine, RANK="0")
        out, err = training.communicate(timeout=120)
        assert training.returncode == 0, out + err
        watching.send_signal(signal.SIGTERM)
        told, trouble = watching.communicate(timeout=20)
    finally:
        watching.kill()
    assert (watching.returncode, trouble) == (143, ""), told
    assert re.search(rf"^GPU 0 is used by python[\d.]* \(pid {training.pid}, [\d,]+ MiB\)$", told, re.MULTILINE)
    assert len(re.findall("is used by", told)) == 1
    assert re.search(r"^GPU 0 Simulated GPU 24 GiB: utilisation \d+ % on average: (starved|swings)", told, re.MULTILINE)
    assert "GPU 1 Simulated GPU 24 GiB: nothing ran on it.\n" in told
    assert "  memory: mean " in told
    assert "A simulated GPU's figures of speed, memory and power are of no real card.\n" in told
    with path.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert {row["gpu"] for row in rows} == {"0", "1", "-1"}
    used_gib = [float(row["mem_used_gib"]) for row in rows if row["gpu"] == "0" and row["mem_used_gib"]]
    assert used_gib[0] == 0
    assert max(used_gib) >= record_of(only_folder(tmp_path))["memory"]["measured_peak_gib"]
