"""What `benchmarks/scaling.py` makes of its runs; a run of it on two devices."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import scaling
from benchmarks.scaling import Case, Ran

ROOT = Path(__file__).parents[2]


def test_strong_scaling_keeps_the_step_and_weak_scaling_each_devices_share() -> None:
    found = scaling.cases([1, 4, 2, 2], 100)
    assert [(case.kind, case.devices, case.effective) for case in found] == [
        ("both", 1, 100),
        ("strong", 2, 100),
        ("strong", 4, 100),
        ("weak", 2, 200),
        ("weak", 4, 400),
    ]


def ran(rate: float, **more: Any) -> Ran:
    names = ("step_ms", "gradients_ms", "gradients_frac", "agreements_ms", "agreements_frac", "alone_ms")
    figures = dict.fromkeys((*names, "calls_per_step", "gradient_bytes", "backend"))
    lists = {"readiness_frac_by_rank": [0.5, 1.0], "wait_frac_by_rank": [0.5, 0.0], "util_pct_by_gpu": []}
    return Ran({**figures, **lists, "samples_per_s": rate, **more}, {})


def test_an_efficiency_is_of_the_two_runs_of_a_round() -> None:
    """A machine that gets slower from round to round changes no ratio."""
    alone, several = [ran(100.0), ran(50.0), ran(10.0)], [ran(160.0), ran(80.0), ran(16.0)]
    found = scaling.result_of(Case("strong", 2, 64), several, alone)
    assert found["efficiency_by_round"] == [0.8, 0.8, 0.8]
    assert (found["n"], found["efficiency_median"], found["efficiency_sd"]) == (3, 0.8, 0.0)
    assert found["gradients_frac"] is None
    assert found["readiness_frac_by_rank"] == [0.5, 1.0]
    assert "0.80 of 2 times the rate of one" in scaling.says([found], "cpu", {})


@pytest.mark.slow
def test_ranks_tell_what_they_did_together(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    asked = [
        "--devices",
        "1,2,64",
        "--steps",
        "8",
        "--rounds",
        "1",
        "--batch",
        "128",
        "--folder",
        str(tmp_path / "runs"),
    ]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "scaling.py"), *asked, "--out", str(out), "--", "telemetry=none"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    by_name = {(one["kind"], one["devices"]): one for one in record["results"]}
    assert set(by_name) == {("both", 1), ("strong", 2), ("weak", 2)}
    assert set(record["config"]["refused"]) == {"strong, 64", "weak, 64"}  # more ranks than cores, or than samples
    for kind in ("strong", "weak"):
        one = by_name[kind, 2]
        assert one["backend"] == "gloo"
        assert one["gradient_bytes"] > 0
        assert 0 < one["gradients_ms"] < one["step_ms"]
        assert 0 < one["gradients_frac"] + one["agreements_frac"] < 1
        assert one["alone_ms"] > 0
        assert len(one["readiness_frac_by_rank"]) == 2
    assert "runs" not in record["command"]
